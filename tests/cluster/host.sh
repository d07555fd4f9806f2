#!/usr/bin/env bash
# Process 1 of a host that is made of namespaces: its own network, mounts, processes and name, on an overlay
# of this machine's root whose upper layer is a tmpfs. All of it goes with this process.
#
#   unshare --net --mount --pid --ipc --uts --fork --kill-child host.sh NAME FOLDER VENV
#
# FOLDER has the hosts' SSH key and, for the laptop, the checkout in `source`. VENV is a virtual environment
# that lies ready at ~/tandem-venv, as deploy/install.sh would make it.
set -euo pipefail
name=$1 folder=$2 venv=$3
recipe=$(echo '/home/tandem/tandem  ' && cat pyproject.toml deploy/install.sh)
home=/home/tandem root=$folder/root
hostname "$name"
mount --make-rprivate /
mkdir -p "$root"
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir "$root"/{upper,work,venv-upper,venv-work,merged}
mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/merged"
mkdir -p "$root/merged$home/tandem-venv"
mount -t overlay overlay -o "lowerdir=$venv,upperdir=$root/venv-upper,workdir=$root/venv-work" \
    "$root/merged$home/tandem-venv"
mkdir -p "$root/merged$home/.cache/tandem"
# Only compiled libraries: models lie in the cache, too, and each host's copy is in memory.
[ ! -d ~/.cache/tandem ] || find ~/.cache/tandem -maxdepth 1 -name '*.so' -exec cp -a -t "$root/merged$home/.cache/tandem" {} +
[ ! -d "$folder/source" ] || cp -a "$folder/source" "$root/merged$home/tandem"
user_home=$HOME
keys=$(mktemp -d); cp "$folder"/key "$folder"/key.pub "$keys"
cd "$root/merged"
for each in dev sys; do mount --rbind "/$each" "$each"; done
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs run
mount -t proc proc proc
cp "$keys"/* run/; rm -r "$keys"
mkdir run/old; pivot_root . run/old; cd /; umount -l /run/old

chmod 755 "$user_home" # the interpreter may lie there
useradd -M -d $home -s /bin/bash -p '*' tandem
cp /etc/skel/.bashrc /etc/skel/.profile $home/
mkdir -p $home/.ssh /run/sshd
install -m 600 /run/key $home/.ssh/id_ed25519
cp /run/key.pub $home/.ssh/authorized_keys
(
    cd $home/tandem-venv
    sha256sum <<<"$recipe" >.installed
    sed -i "1s|^#!.*|#!$home/tandem-venv/bin/python|" bin/ray
    finder=$(echo lib/python3*/site-packages/__editable___tandem*.py)
    source=$(sed -n "s|.*'deploy': '\([^']*\)/deploy'.*|\1|p" "$finder")
    sed -i "s|'$source/|'$home/tandem/|g" "$finder"
    printf '#!%s\nimport sys\nfrom deploy.__main__ import main\nsys.exit(main())\n' $home/tandem-venv/bin/python >bin/tandem
    chmod 755 bin/tandem
)
chown tandem: $home $home/tandem-venv/.installed
find $home/tandem-venv -type d -exec chown tandem: {} + # or each process of its would compile anew what it imports
chown -R tandem: $home/.[!.]*
[ "$name" != laptop ] || { ln -s $home/tandem-venv $home/tandem/.venv; chown -R -h tandem: $home/tandem; }
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" >/etc/hosts # as Debian writes it
ssh-keygen -q -t ed25519 -N '' -f /run/host_key
cat >/run/sshd_config <<CONF
HostKey /run/host_key
UsePAM no
PasswordAuthentication no
MaxStartups 100
PidFile none
CONF
while [ ! -e "/sys/class/net/eth0" ] || ! ip -4 addr show dev eth0 | grep -q inet; do sleep 0.02; done
/usr/sbin/sshd -D -e -f /run/sshd_config &
while :; do wait -n || sleep 0.2; done # reaps what is orphaned
