//! Both ends against rust-vmm's `vhost` crate, an implementation of the protocol that shares no
//! code and no author with this one.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ringferry_memory::{GuestMemory, RegionSpec, SharedMem};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{F_PROTOCOL_FEATURES, F_VERSION_1};
use ringferry_vhost_user::{
    Device, FrontendError, Offer, ProtocolFeatures, RingPlan, RingSetup, Session, Wanted, connect_device,
};
use rustix::event::{PollFd, PollFlags};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserHeaderFlag,
    VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, Frontend, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserFrontend,
    VhostUserProtocolFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

const USER: u64 = 0x7f00_0000_0000;
const SIZE: u64 = 0x1_0000;

fn pair() -> (Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Stream::from_fd(ours.into()).unwrap(), theirs)
}

fn memory() -> SharedMem {
    SharedMem::new("guest", SIZE as usize).unwrap()
}

/// Writes down what happens, one word per call.
#[derive(Default)]
struct Port {
    log: Vec<String>,
}

impl Device for Port {
    fn features_acked(&mut self, features: u64) {
        self.log.push(format!("features {features:#x}"));
    }
    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.log.push(format!("regions {}", memory.map_or(0, |memory| memory.regions().len())));
    }
    fn ring_started(&mut self, index: u16, ring: RingSetup) {
        assert!(ring.kick.is_some() && ring.call.is_some() && ring.err.is_some());
        self.log.push(format!("start {index} size {} base {}", ring.parts.size, ring.base));
    }
    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {}
    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        self.log.push(format!("enable {index} {enabled}"));
    }
    fn ring_stopped(&mut self, index: u16) -> u16 {
        self.log.push(format!("stop {index}"));
        42
    }
    fn config(&self, offset: usize, buf: &mut [u8]) -> bool {
        buf.fill(offset as u8);
        true
    }
    fn set_config(&mut self, offset: usize, data: &[u8]) -> bool {
        self.log.push(format!("config {offset} {data:?}"));
        true
    }
    fn reset(&mut self) {
        self.log.push("reset".to_owned());
    }
}

/// Our back end, until the other side has gone.
fn our_back_end(stream: Stream) -> JoinHandle<Vec<String>> {
    std::thread::spawn(move || {
        let mut offer = Offer::net(F_VERSION_1, 2);
        offer.protocol |= ProtocolFeatures::CONFIG;
        let mut session = Session::new(stream, offer).unwrap();
        let mut port = Port::default();
        loop {
            rustix::event::poll(&mut [PollFd::new(&session, PollFlags::IN)], None).unwrap();
            if let Err(err) = session.on_readable(&mut port) {
                assert!(err.is_disconnect(), "{err}");
                assert_eq!(session.counters().rejected, 1, "the one bad message of the test");
                return port.log;
            }
        }
    })
}

#[test]
fn rust_vmm_front_end_drives_our_back_end() {
    let (ours, theirs) = pair();
    let back = our_back_end(ours);
    let mut front = Frontend::from_stream(theirs, 2);
    front.set_owner().unwrap();
    assert_eq!(front.get_features().unwrap(), F_VERSION_1 | F_PROTOCOL_FEATURES);
    let offered = front.get_protocol_features().unwrap();
    assert!(offered.contains(VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::CONFIG));
    front.set_protocol_features(offered).unwrap();
    // From here on every message is acknowledged.
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    front.set_features(F_VERSION_1 | F_PROTOCOL_FEATURES).unwrap();
    assert_eq!(front.get_max_mem_slots().unwrap(), 32);
    let mem = memory();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: SIZE,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: mem.fd().as_raw_fd(),
    };
    front.set_mem_table(&[region]).unwrap();
    let wanted = VhostUserInflight { mmap_size: 0, mmap_offset: 0, num_queues: 2, queue_size: 256 };
    let (tracked, file) = front.get_inflight_fd(&wanted).unwrap();
    assert_eq!({ tracked.mmap_size }, 2 * (16 + 16 * 256 + 48));
    front.set_inflight_fd(&tracked, file.as_raw_fd()).unwrap();
    let ring = VringConfigData {
        queue_max_size: 256,
        queue_size: 256,
        flags: 0,
        desc_table_addr: USER,
        used_ring_addr: USER + 0x2000,
        avail_ring_addr: USER + 0x1000,
        log_addr: None,
    };
    let event = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
    for index in [0, 1] {
        front.set_vring_num(index, 256).unwrap();
        front.set_vring_addr(index, &ring).unwrap();
        front.set_vring_base(index, 7).unwrap();
        front.set_vring_call(index, &event).unwrap();
        front.set_vring_err(index, &event).unwrap();
        front.set_vring_kick(index, &event).unwrap();
        front.set_vring_enable(index, true).unwrap();
    }
    let bad = VringConfigData { desc_table_addr: USER + 8, ..ring };
    assert!(front.set_vring_addr(0, &bad).is_err());
    let dimm = VhostUserMemoryRegionInfo { guest_phys_addr: 1 << 32, userspace_addr: 1 << 40, ..region };
    front.add_mem_region(&dimm).unwrap();
    front.remove_mem_region(&dimm).unwrap();
    let (_, config) = front.get_config(6, 4, VhostUserConfigFlags::WRITABLE, &[0; 4]).unwrap();
    assert_eq!(config, [6; 4]);
    front.set_config(3, VhostUserConfigFlags::WRITABLE, &[1, 2]).unwrap();
    assert_eq!(front.get_vring_base(0).unwrap(), 42);
    assert_eq!(front.get_vring_base(1).unwrap(), 42);
    front.reset_device().unwrap();
    assert_eq!(front.get_queue_num().unwrap(), 2);
    drop(front);
    let restart = |regions: &str| {
        ["stop 0", "stop 1", regions, "start 0 size 256 base 42", "start 1 size 256 base 42"]
            .map(str::to_owned)
    };
    let mut expected: Vec<String> = [
        "features 0x100000000",
        "regions 1",
        "start 0 size 256 base 7",
        "enable 0 true",
        "start 1 size 256 base 7",
        "enable 1 true",
    ]
    .map(str::to_owned)
    .to_vec();
    expected.extend(restart("regions 2"));
    expected.extend(restart("regions 1"));
    expected.extend(["config 3 [1, 2]", "stop 0", "stop 1", "reset", "regions 0"].map(str::to_owned));
    assert_eq!(back.join().unwrap(), expected);
}

/// A device behind rust-vmm's request handler, as cautious as that crate's own users are.
#[derive(Default)]
struct Handler {
    log: Vec<String>,
    features: u64,
    enabled: [bool; 2],
}

impl Handler {
    fn note(&mut self, what: String) -> Result<()> {
        self.log.push(what);
        Ok(())
    }
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn set_owner(&mut self) -> Result<()> {
        self.note("owner".to_owned())
    }
    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }
    fn reset_device(&mut self) -> Result<()> {
        self.note("reset".to_owned())
    }
    fn get_features(&mut self) -> Result<u64> {
        Ok(F_VERSION_1 | F_PROTOCOL_FEATURES)
    }
    fn set_features(&mut self, features: u64) -> Result<()> {
        self.features = features;
        self.note(format!("features {features:#x}"))
    }
    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        assert_eq!(files[0].metadata().unwrap().len(), SIZE);
        let (addr, size) = (regions[0].user_addr, regions[0].memory_size);
        self.note(format!("table of {} at {addr:#x} size {size:#x}", regions.len()))?;
        Ok(None)
    }
    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.note(format!("num {index} {num}"))
    }
    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        desc: u64,
        used: u64,
        avail: u64,
        _: u64,
    ) -> Result<()> {
        self.note(format!("addr {index} {desc:#x} {avail:#x} {used:#x}"))
    }
    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.note(format!("base {index} {base}"))
    }
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.note(format!("stop {index}"))?;
        Ok(VhostUserVringState::new(index, 5 + index))
    }
    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.note(format!("kick {index} {}", fd.is_some()))
    }
    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.note(format!("call {index} {}", fd.is_some()))
    }
    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.note(format!("err {index} {}", fd.is_some()))
    }
    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }
    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.note(format!("protocol {features:#x}"))
    }
    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(1)
    }
    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        // The rule for which QEMU's virtio-net cannot use that crate.
        if self.features & F_PROTOCOL_FEATURES == 0 {
            return Err(Error::InvalidOperation("enabled before SET_FEATURES"));
        }
        self.enabled[index as usize] = enable;
        self.note(format!("enable {index} {enable}"))
    }
    fn get_config(&mut self, _: u32, _: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Err(Error::InvalidParam)
    }
    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidParam)
    }
    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidParam)
    }
    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidParam)
    }
    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let region = VhostUserInflight { mmap_size: SIZE, ..*wanted };
        self.note(format!("track {} of {}", { wanted.num_queues }, { wanted.queue_size }))?;
        Ok((region, memory().fd().try_clone_to_owned().unwrap().into()))
    }
    fn set_inflight_fd(&mut self, region: &VhostUserInflight, file: File) -> Result<()> {
        assert_eq!(file.metadata().unwrap().len(), SIZE);
        self.note(format!("tracked {} of {} in {}", { region.num_queues }, { region.queue_size }, {
            region.mmap_size
        }))
    }
    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(8)
    }
    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        let addr = region.user_addr;
        if addr == 0 {
            return Err(Error::InvalidParam);
        }
        self.note(format!("add {addr:#x}"))?;
        Ok(None)
    }
    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let addr = region.user_addr;
        self.note(format!("remove {addr:#x}"))
    }
    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidParam)
    }
    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidParam)
    }
    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidParam)
    }
    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(Error::InvalidParam)
    }
}

#[test]
fn our_front_end_drives_the_rust_vmm_back_end() {
    let (ours, theirs) = pair();
    let handler = Arc::new(Mutex::new(Handler::default()));
    let back = {
        let mut requests = BackendReqHandler::from_stream(theirs, Arc::clone(&handler));
        // A handler's failure comes back as an error here too, after the front end was told.
        std::thread::spawn(move || while !matches!(requests.handle_request(), Err(Error::Disconnected)) {})
    };
    let wanted = Wanted { features: 1 << 15, required: F_VERSION_1, protocol: Wanted::NET_PROTOCOL };
    let mut device = connect_device(ours, &wanted).unwrap();
    let negotiated = device.negotiated();
    assert_eq!((negotiated.features, negotiated.queue_num), (F_VERSION_1, 1));
    assert!(
        negotiated.protocol.contains(ProtocolFeatures::REPLY_ACK | ProtocolFeatures::CONFIGURE_MEM_SLOTS)
    );
    let mem = memory();
    let spec = RegionSpec { guest_addr: 0, size: SIZE, user_addr: USER, mmap_offset: 0 };
    let event = EventFd::new().unwrap();
    let ring = RingPlan {
        size: 256,
        base: Some(3),
        desc: USER,
        avail: USER + 0x1000,
        used: USER + 0x2000,
        kick: Some(event.as_fd()),
        call: Some(event.as_fd()),
        err: None,
        enabled: true,
    };
    let polled = RingPlan { kick: None, call: None, err: Some(event.as_fd()), enabled: false, ..ring };
    device.start(&[(spec, mem.fd())], &[ring, polled]).unwrap();
    let dimm = RegionSpec { user_addr: 0x1000, ..spec };
    device.frontend().add_mem_reg(dimm, mem.fd()).unwrap();
    device.frontend().rem_mem_reg(dimm).unwrap();
    let refused = device.frontend().add_mem_reg(RegionSpec { user_addr: 0, ..spec }, mem.fd());
    assert!(matches!(refused, Err(FrontendError::Refused("ADD_MEM_REG"))), "{refused:?}");
    assert_eq!(device.stop().unwrap(), [5, 6]);
    drop(device);
    back.join().unwrap();
    let expected = [
        "protocol 0x9009",
        "owner",
        "features 0x140000000",
        "table of 1 at 0x7f0000000000 size 0x10000",
        "track 2 of 256",
        "tracked 2 of 256 in 65536",
        "enable 0 true",
        "enable 1 false",
        "num 0 256",
        "base 0 3",
        "addr 0 0x7f0000000000 0x7f0000001000 0x7f0000002000",
        "kick 0 true",
        "call 0 true",
        "num 1 256",
        "base 1 3",
        "addr 1 0x7f0000000000 0x7f0000001000 0x7f0000002000",
        "err 1 true",
        "kick 1 false",
        "call 1 false",
        "add 0x1000",
        "remove 0x1000",
        "stop 0",
        "stop 1",
    ];
    assert_eq!(handler.lock().unwrap().log, expected);
}
