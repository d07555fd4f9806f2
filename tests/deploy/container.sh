#!/usr/bin/env bash
# Process 1 of a container made of namespaces: the image's root file system is this machine's, read-only, with the
# working tree at /opt/tandem. All of it goes with this process.
#
#   unshare --net --mount --pid --ipc --uts --fork --kill-child container.sh NAME FOLDER VENV UID COMMAND...
#
# In FOLDER: `image/` is the working tree, `hosts` becomes /etc/hosts, and each line of `mounts` is
# "tmpfs TARGET OPTIONS" or "bind TARGET SOURCE ro|rw". The environment is the container's.
set -euo pipefail
name=$1 folder=$2 venv=$3 user=$4
shift 4
hostname "$name"
mount --make-rprivate /
mkdir -p "$folder/$name"
mount -t tmpfs -o mode=755 tmpfs "$folder/$name"
cd "$folder/$name"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
cd root
[ -e home/tandem ] || mkdir home/tandem
mkdir -p opt/tandem
mount --bind "$folder/image" opt/tandem
mount --bind -o remount,ro opt/tandem
cp "$folder/hosts" etc/hosts
chmod 755 ".$HOST_HOME" # the interpreter may lie there
for each in dev sys; do mount --rbind "/$each" "$each"; done
mount -t proc proc proc
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777,size=256m tmpfs dev/shm
while read -r kind target options mode; do
    mkdir -p ".$target"
    case $kind in
    tmpfs) mount -t tmpfs -o "$options" tmpfs ".$target" ;;
    bind) mount --bind "$options" ".$target"; mount --bind -o "remount,$mode" ".$target" ;;
    esac
done <"$folder/$name.mounts"
mkdir run/old
mount -o remount,ro .
pivot_root . run/old; cd /; umount -l /run/old
while ! ip -4 addr show dev eth0 2>/dev/null | grep -q inet; do sleep 0.02; done
cd /opt/tandem
setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set -all --inh-caps -all env -u HOST_HOME "$@" &
pid=$!
trap 'kill -TERM $pid' TERM
while kill -0 $pid 2>/dev/null; do wait -n || true; done # reaps what is orphaned
