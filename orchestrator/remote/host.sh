# Runs on the host, as: sh -c THIS orch-host NONCE KIND ID -- COMMAND...
# Prints what the host knows, each line behind the nonce so that banners and start-up files cannot be taken for it,
# then becomes COMMAND: the way into the container, or the next script where there is none.
nonce=$1 kind=$2 id=$3
shift 4
LC_ALL=C
export LC_ALL
PATH=${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin
bounded() {
  # Without timeout(1) the client's own bound has to do.
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$@"; else shift; "$@"; fi
}
say() { printf '%s host.%s %s\n' "$nonce" "$1" "$2"; }
# The first line of a file, by the shell itself: no process, nothing where it is missing.
first() { if [ -r "$2" ]; then IFS= read -r line <"$2" && say "$1" "$line"; fi; }
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
  esac
  if [ -n "$file" ] && [ -r "$file" ]; then
    # The cluster's file system may hang. Sections in brackets are snapshots, not the present state.
    bounded 3 cat "$file" | while IFS= read -r line || [ -n "$line" ]; do
      case $line in '['*) break ;; esac
      say config "$line"
    done
  fi
  if command -v dmesg >/dev/null 2>&1; then
    bounded 1 dmesg | grep -E 'NVRM: Xid|oom-kill|Out of memory' | tail -n 20 | while IFS= read -r line; do
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
        while IFS= read -r line; do
          case $line in */lxc/* | */lxc.payload.*)
            owner=${line#*/lxc/}
            owner=${owner#*/lxc.payload.}
            owner=${owner%%/*}
            ;;
          esac
        done <"/proc/$pid/cgroup"
        IFS= read -r command <"/proc/$pid/comm" || command=
        say gpu_process "$pid $owner $command"
      done
    fi
  fi
} 2>/dev/null
exec "$@"
