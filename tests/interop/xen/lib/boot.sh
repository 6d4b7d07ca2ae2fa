# One boot: Xen, dom0, one case, power off. dom0 finds the case in a shared folder and leaves there what came of it.

# boot SHARE CONSOLE: runs /share/case in dom0. As commas separate modules in -initrd, no path or argument may have one.
boot() {
    local share=$1 console=$2
    case $CACHE$share in *,*) die "the path of the working folder has a comma in it: $CACHE" ;; esac
    # spec-ctrl=eager-fpu: under emulation, Xen's lazy switching of the FPU lets vector registers leak between domains, and
    # programs die at random. -rdtscp: a PVH domain trips over it. earlyprintk=xen: a panic of dom0 is seen.
    # conring_size: a line for each of thousands of grants.
    qemu-system-x86_64 -accel tcg -cpu max,-smap,-smep,-rdtscp -m 2048 -smp 1 -display none -nic none -no-reboot -no-user-config \
        -serial "file:$console" -monitor none \
        -kernel "$CACHE/xen" \
        -append "console=com1 com1=115200,8n1 dom0_mem=1024M,max:1024M dom0_max_vcpus=1 loglvl=warning guest_loglvl=warning conring_size=1m spec-ctrl=eager-fpu" \
        -initrd "$CACHE/vmlinux console=hvc0 earlyprintk=xen panic=-1 quiet loglevel=4 net.ifnames=0,$CACHE/initrd.cpio" \
        -virtfs "local,path=$share,mount_tag=share,security_model=none,id=share"
}
