# Runs on the host behind host.sh, as: sh -c THIS orch-doctor NONCE KIND ID SUDO
# Prints what `orch doctor` asks of a host alone: the container's state, its own device nodes, its backup jobs.
nonce=$1 kind=$2 id=$3 sudo=$4
if [ "$sudo" = sudo ]; then sudo='sudo -n --'; else sudo=; fi
bounded() {
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$@"; else shift; "$@"; fi
}
say() { printf '%s doctor.%s %s\n' "$nonce" "$1" "$2"; }
{
  for node in nvidia0 nvidiactl nvidia-uvm; do
    if [ -e "/dev/$node" ]; then say device "$node"; fi
  done
  # Of the other kinds host.sh has told the state.
  case $kind in pct | lxc)
    # shellcheck disable=SC2086 # $sudo is words, or nothing
    if ! command -v lxc-info >/dev/null 2>&1; then
      say unread 'state there is no lxc-info on the host'
    elif state=$(bounded 3 $sudo lxc-info -n "$id" -sH); then
      say state "$state"
    else
      say unread 'state lxc-info did not say'
    fi
    ;;
  esac
  case $kind in docker | podman)
    if command -v nvidia-ctk >/dev/null 2>&1 || command -v nvidia-container-cli >/dev/null 2>&1; then
      say toolkit 1
    fi
    ;;
  esac
  if [ -d /etc/pve ] && { [ "$kind" = pct ] || [ "$kind" = lxc ]; }; then
    say pve 1
    # The cluster's file system may hang.
    for file in /etc/pve/jobs.cfg /etc/pve/vzdump.cron /etc/vzdump.conf; do
      # shellcheck disable=SC2086
      if [ -r "$file" ]; then
        text=$(bounded 3 cat "$file") || { say unread "backups $file gave no answer" && continue; }
      elif [ -n "$sudo" ] && text=$(bounded 3 $sudo cat "$file"); then
        :
      else
        if [ -e "$file" ] || [ ! -x "${file%/*}" ]; then
          say unread "backups $file may not be read by this user"
        fi
        continue
      fi
      printf '%s\n' "$text" | while IFS= read -r line; do say "${file##*/}" "$line"; done
    done
  fi
} </dev/null 2>/dev/null
say done 1
