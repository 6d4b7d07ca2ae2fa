//! The machine an experiment ran on, and the program that ran it: what a reader must know to make sense
//! of a number.

use std::collections::BTreeSet;
use std::fs;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Facts about machine and program. Facts that the system does not tell are absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Machine {
    pub cpu: Option<String>,
    pub cpus_online: usize,
    /// Processors this process may use.
    pub cpus_allowed: Vec<usize>,
    /// Processors that share a core, as the kernel lists them: `0-1` or `0,4`.
    pub cores: Vec<String>,
    /// Caches of the first processor, `L1 data 48K` for example.
    pub caches: Vec<String>,
    /// True if the processor says that it is virtual.
    pub virtual_machine: bool,
    /// Kernel name, release, architecture.
    pub kernel: String,
    pub memory_bytes: u64,
    /// The frequency governor, if there is one to see.
    pub governor: Option<String>,
    /// Load average over 1, 5 and 15 minutes before measuring began.
    pub load_average: Option<[f64; 3]>,
    pub ringferry: String,
    /// The commit it was built from, if the build said so (`RINGFERRY_COMMIT` in its environment).
    pub commit: Option<String>,
    /// `release`, or `debug` for a build whose figures mean little.
    pub build: String,
}

impl Machine {
    /// Reads the facts of this machine.
    pub fn here() -> Self {
        let name = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |wanted: &str| {
            let mut lines = cpu_info.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| key.trim() == wanted).map(|(_, value)| value.trim().to_owned())
        };
        let info = rustix::system::sysinfo();
        Self {
            cpu: field("model name"),
            cpus_online: cpu_info.lines().filter(|line| line.starts_with("processor")).count(),
            cpus_allowed: ringferry_sys::cpu::allowed().unwrap_or_default(),
            cores: cores(),
            caches: caches(),
            virtual_machine: field("flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            kernel: format!("{} {} {}", text(name.sysname()), text(name.release()), text(name.machine())),
            memory_bytes: info.totalram as u64 * u64::from(info.mem_unit),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            load_average: line("/proc/loadavg").and_then(|text| {
                let mut numbers = text.split(' ').map(str::parse);
                Some([numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?])
            }),
            ringferry: env!("CARGO_PKG_VERSION").into(),
            commit: option_env!("RINGFERRY_COMMIT").map(Into::into),
            build: if cfg!(debug_assertions) { "debug" } else { "release" }.into(),
        }
    }

    /// Names and values for people, in the order they are shown.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let known = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
        let list = |values: &[String]| if values.is_empty() { "unknown".into() } else { values.join(", ") };
        let allowed: Vec<String> = self.cpus_allowed.iter().map(ToString::to_string).collect();
        let load = self.load_average.map(|load| load.map(|value| format!("{value:.2}")).join(" "));
        vec![
            ("processor", known(&self.cpu)),
            ("processors", format!("{} online, allowed: {}", self.cpus_online, allowed.join(" "))),
            ("cores", list(&self.cores)),
            ("caches", list(&self.caches)),
            ("virtual machine", if self.virtual_machine { "yes" } else { "no" }.into()),
            ("memory", format!("{:.1} GiB", self.memory_bytes as f64 / f64::from(1 << 30))),
            ("kernel", self.kernel.clone()),
            ("governor", self.governor.clone().unwrap_or_else(|| "none visible".into())),
            ("load at start", known(&load)),
            ("ringferry", format!("{} {} build, commit {}", self.ringferry, self.build, known(&self.commit))),
        ]
    }
}

/// The first line of a file, if it can be read.
fn line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(|line| line.trim().to_owned())
}

fn cores() -> Vec<String> {
    let cpus = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
    let siblings = cpus.filter_map(|cpu| line(cpu.path().join("topology/thread_siblings_list").to_str()?));
    siblings.collect::<BTreeSet<_>>().into_iter().collect()
}

fn caches() -> Vec<String> {
    let cache = |index: usize| {
        let part = |name| line(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"));
        let kind = match part("type")?.as_str() {
            "Unified" => String::new(),
            kind => format!(" {}", kind.to_lowercase()),
        };
        Some(format!("L{}{kind} {}", part("level")?, part("size")?))
    };
    (0..8).map_while(cache).collect()
}

/// The time now, RFC 3339, UTC, whole seconds.
pub fn now() -> String {
    rfc3339(Timestamp::now())
}

fn rfc3339(time: Timestamp) -> String {
    format!("{time:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::here();
        assert!(machine.cpus_online >= 1 && !machine.cpus_allowed.is_empty());
        assert!(machine.memory_bytes > 1 << 20 && machine.kernel.starts_with("Linux "));
        assert!(machine.facts().iter().all(|(name, value)| !name.is_empty() && !value.is_empty()));
        let json = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&json).unwrap(), machine);
    }

    #[test]
    fn times_are_written_in_whole_seconds() {
        // `date -u -d @951868799 +%FT%TZ`
        let time = Timestamp::new(951_868_799, 999_999_999).unwrap();
        assert_eq!(rfc3339(time), "2000-02-29T23:59:59Z");
    }
}
