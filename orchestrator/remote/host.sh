# Runs on the host, as: sh -c THIS orch-host NONCE KIND ID SUDO -- COMMAND...
# Prints what the host knows, each line behind the nonce so that banners and start-up files cannot be taken for it,
# then becomes COMMAND: the way into the container, or the next script where there is none.
# SUDO is "sudo" where the way into containers goes through it: what only root may read is then read so, if sudoers
# allows that, and else stays unknown.
nonce=$1 kind=$2 id=$3 sudo=$4
shift 5
LC_ALL=C
export LC_ALL
PATH=${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin
if [ "$sudo" = sudo ]; then sudo='sudo -n --'; else sudo=; fi
# The container's configuration. The cluster's file system may hang.
configuration() {
  # shellcheck disable=SC2086 # $sudo is words, or nothing
  case $kind in
    pct | lxc)
      if [ -r "$file" ]; then
        bounded 3 cat "$file"
      elif [ -n "$sudo" ]; then
        bounded 3 $sudo cat "$file"
      fi
      ;;
    incus) bounded 3 $sudo incus config show "$id" --expanded ;;
  esac
}
bounded() {
  # Without timeout(1) the client's own bound has to do.
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$@"; else shift; "$@"; fi
}
say() { printf '%s host.%s %s\n' "$nonce" "$1" "$2"; }
# The first line of a file, by the shell itself: no process, nothing where it is missing.
first() { if [ -r "$2" ]; then IFS= read -r line <"$2" && say "$1" "$line"; fi; }
# Reads the text of a /proc/PID/cgroup; sets owner to the container that the process is in: a VMID (pct), a name (lxc,
# incus; PROJECT_NAME outside of incus's default project), the short id of docker and podman, or "host". Of containers
# in containers the outermost counts, since that is the one which this host knows.
owner_of() {
  owner=host
  while IFS= read -r line; do
    rest=${line#*:*:/}/ above=
    while [ -n "$rest" ]; do
      part=${rest%%/*} rest=${rest#*/}
      case $above/$part in
        lxc/?* | lxc.payload/?*) owner=$part ;;
        */lxc.payload.?*) owner=${part#lxc.payload.} ;;
        */libpod-conmon-*) ;; # podman's own process beside the container
        docker/????????????* | */docker-*.scope | */libpod-* | */cri-containerd-*.scope | */crio-*.scope)
          owner=${part#libpod-payload-}
          owner=${owner#cri-}
          case $above in docker) ;; *) owner=${owner#*-} ;; esac
          owner=$(printf %.12s "$owner")
          ;;
      esac
      if [ "$owner" != host ]; then return; fi
      above=$part
    done
  done
}
{
  printf '\n'
  say shell "${0}"
  first hostname /proc/sys/kernel/hostname
  first kernel /proc/sys/kernel/osrelease
  first boot_id /proc/sys/kernel/random/boot_id
  first uptime /proc/uptime
  first driver /proc/driver/nvidia/version
  say time "$(date +%s.%N)"
  file=
  case $kind in
    pct) file=/etc/pve/lxc/$id.conf ;;
    lxc)
      path=/var/lib/lxc
      if [ -r /etc/lxc/lxc.conf ]; then
        while read -r key equals value; do
          if [ "$key$equals" = lxc.lxcpath= ]; then path=$value; fi
        done </etc/lxc/lxc.conf
      fi
      file=$path/$id/config
      if [ -x "$path" ] && [ ! -e "$file" ]; then say missing 1; fi
      ;;
    incus)
      say incus 1
      # shellcheck disable=SC2086
      if state=$(bounded 3 $sudo incus list --format csv --columns s "^$id\$"); then say state "$state"; fi
      ;;
    docker | podman)
      template='{{.State.Status}} {"image": {{json .Image}}, "host": {{json .HostConfig}}}'
      # shellcheck disable=SC2086
      if text=$(bounded 3 $sudo "$kind" inspect --type container --format "$template" "$id"); then
        say state "${text%% *}"
        say inspect "${text#* }"
      fi
      ;;
  esac
  # Sections in brackets are snapshots, not the present state.
  configuration | while IFS= read -r line || [ -n "$line" ]; do
    case $line in '['*) break ;; esac
    say config "$line"
  done
  if command -v dmesg >/dev/null 2>&1; then
    # shellcheck disable=SC2086
    { bounded 1 dmesg || { [ -n "$sudo" ] && bounded 1 $sudo dmesg; }; } |
      grep -E 'NVRM: Xid|oom-kill|Out of memory' | tail -n 20 | while IFS= read -r line; do
      say kernel_log "$line"
    done
  fi
  # Whose processes are on the GPUs: inside a container none but its own can be seen.
  if command -v nvidia-smi >/dev/null 2>&1 && [ "$kind" != none ]; then
    if pids=$(bounded 2 nvidia-smi --query-compute-apps=pid --format=csv,noheader); then
      say gpus 1
      for pid in $pids; do
        case $pid in *[!0-9]*) continue ;; esac
        owner=host
        owner_of <"/proc/$pid/cgroup"
        IFS= read -r command <"/proc/$pid/comm" || command=
        say gpu_process "$pid $owner $command"
      done
    fi
  fi
} 2>/dev/null
exec "$@"
