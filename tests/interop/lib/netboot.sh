# What a guest boots from when only its firmware can reach the kernel: DHCP and HTTP on the host's end of the network (busybox).

# netboot_serve NAMESPACE DEVICE ADDRESS OFFERED: answers on 10.9.0.ADDRESS, and gives the guest 10.9.0.OFFERED and an iPXE script.
netboot_serve() {
    local namespace=$1 device=$2 address=$3 offered=$4 folder=$RUN/netboot
    mkdir -p "$folder"
    ln -s "$KERNEL" "$folder/vmlinuz"
    ln -s "$INITRD" "$folder/initrd"
    cat >"$folder/boot.ipxe" <<TEXT
#!ipxe
kernel http://10.9.0.$address/vmlinuz initrd=initrd $GUEST_COMMAND_LINE
initrd http://10.9.0.$address/initrd
boot
TEXT
    cat >"$RUN/udhcpd.conf" <<TEXT
interface $device
start 10.9.0.$offered
end 10.9.0.$offered
lease_file $RUN/udhcpd.leases
pidfile $RUN/udhcpd.pid
boot_file http://10.9.0.$address/boot.ipxe
option subnet 255.255.255.0
TEXT
    touch "$RUN/udhcpd.leases"
    spawn "httpd-$namespace" ip netns exec "$PREFIX$namespace" busybox httpd -f -v -p "10.9.0.$address:80" -h "$folder"
    spawn "udhcpd-$namespace" ip netns exec "$PREFIX$namespace" busybox udhcpd -f "$RUN/udhcpd.conf"
}
