# Runs on the host behind host.sh, as: sh -c THIS orch-doctor NONCE KIND ID
# Prints what `orch doctor` asks of a host alone: the container's state, its own device nodes, its backup jobs.
nonce=$1 kind=$2 id=$3
bounded() {
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$@"; else shift; "$@"; fi
}
say() { printf '%s doctor.%s %s\n' "$nonce" "$1" "$2"; }
{
  for node in nvidia0 nvidiactl nvidia-uvm; do
    if [ -e "/dev/$node" ]; then say device "$node"; fi
  done
  if [ "$kind" != none ]; then
    if ! command -v lxc-info >/dev/null 2>&1; then
      say unread 'state there is no lxc-info on the host'
    elif state=$(bounded 3 lxc-info -n "$id" -sH); then
      say state "$state"
    else
      say unread 'state lxc-info did not say'
    fi
    if [ -d /etc/pve ]; then say pve 1; fi
    # The cluster's file system may hang.
    for file in /etc/pve/jobs.cfg /etc/pve/vzdump.cron /etc/vzdump.conf; do
      if [ -r "$file" ]; then
        if text=$(bounded 3 cat "$file"); then
          printf '%s\n' "$text" | while IFS= read -r line; do say "${file##*/}" "$line"; done
        else
          say unread "backups $file gave no answer"
        fi
      elif [ -e "$file" ]; then
        say unread "backups $file may not be read by this user"
      fi
    done
  fi
} </dev/null 2>/dev/null
say done 1
