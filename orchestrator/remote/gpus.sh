# Runs on the host, as: sh -c THIS orch-gpus NONCE MODE KIND ID SUDO RUN FIELDS
# with the function owner_of of host.sh before it, so that there is one way to tell whose a process is.
# Prints the GPUs (FIELDS of them), the processes on them and the claims of all users, each line behind the nonce.
# MODE "read" ends there. MODE "claim" prints the claims while it holds the host's lock, waits for the workstation's
# decision on stdin ("none", or "take", the lines of a claim, "end"), keeps that, frees the lock, and stays until stdin
# ends: as long as this process lives, or a runner of RUN in its container, the claim counts.
nonce=$1 mode=$2 kind=$3 id=$4 sudo=$5 run=$6 fields=$7
LC_ALL=C
export LC_ALL
PATH=${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/nvidia/bin:/usr/lib/wsl/lib:/opt/bin
if [ "$sudo" = sudo ]; then sudo='sudo -n --'; else sudo=; fi
bounded() {
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$@"; else shift; "$@"; fi
}
say() { printf '%s gpus.%s %s\n' "$nonce" "$1" "$2"; }
# Sets `started` to when the process began, in ticks since the boot; empty where it is gone.
start_of() {
  started=
  IFS= read -r line <"/proc/$1/stat" || return 1
  # shellcheck disable=SC2086 # the numbers behind the name
  set -- ${line##*) }
  started=${20}
}
# Whether a runner of the run $1 lives in the container $2 ("?": in any). Its words are: python -I ZIPAPP runner FOLDER,
# or python -I -c CODE FOLDER, by which the code imports the runner; tmux has them all too, and stays when it is gone.
runner_lives() {
  for file in $(grep -l -F -e "/runs/$1" /proc/[0-9]*/cmdline); do
    if tr '\0' '\n' <"$file" | {
      two='' four='' five=''
      IFS= read -r line && IFS= read -r two && IFS= read -r line && IFS= read -r four && IFS= read -r five
      case $two/$four in -I/runner | -I/*remote.runner\ import\ main*) [ "${five%/runs/"$1"}" != "$five" ] ;; *) false ;; esac
    }; then
      owner='?'
      owner_of <"${file%/cmdline}/cgroup"
      # incus puts a project's name before the container's
      case $2 in '?' | "$owner" | "${owner#*_}") return 0 ;; esac
    fi
  done
  return 1
}
# One claim's file: its lines, and whether it is alive. The dead ones go, where the lock is held.
tell() {
  holder='' boot='' of='' there='?'
  while IFS= read -r line; do
    case $line in
      'holder '*) holder=${line#holder } ;;
      'boot '*) boot=${line#boot } ;;
      'run '*) of=${line#run } ;;
      'owner '*) there=${line#owner } ;;
    esac
  done <<END
$1
END
  alive=no
  case ${holder%% *} in
    '' | *[!0-9]*) ;;
    *) if start_of "${holder%% *}" && [ "$started" = "${holder#* }" ] && [ "$boot" = "$this_boot" ]; then alive=held; fi ;;
  esac
  case $of in '' | *[!A-Za-z0-9._-]*) return ;; esac
  if runner_lives "$of" "$there"; then
    alive=runs
  elif [ "$alive" = no ] && [ ! -e /proc/1/cmdline ]; then
    alive=unknown # the processes of others are hidden here
  fi
  if [ "$alive" = no ]; then
    if [ -n "$locked" ]; then rm -f "$2"; fi
    return
  fi
  number=$((number + 1))
  printf '%s\nalive %s\n' "$1" "$alive" | while IFS= read -r line; do say claim "$number $line"; done
}
claims() {
  number=0
  for dir in "$base"/orch-gpus-[0-9]*; do
    uid=${dir##*-}
    case $uid in *[!0-9]*) continue ;; esac
    if [ -z "$(find "$dir" -prune -type d -user "$uid")" ]; then continue; fi
    # No other names: one with a blank in it would be split into files that are not that user's.
    for path in $(find "$dir" -maxdepth 1 -type f -user "$uid" -name 'claim-*' ! -name '*[!A-Za-z0-9._-]*'); do
      if [ -f "$path" ]; then tell "$(head -c 8192 "$path")" "$path"; fi
    done
  done
}
# Under the one name that all users of this host lock; opened for reading, so that it may be anybody's.
lock() {
  if ! command -v flock >/dev/null; then
    say unread 'lock there is no flock(1)'
    return
  fi
  file=$base/orch-gpus.lock
  if [ ! -e "$file" ]; then (umask 022 && set -C && : >"$file"); fi
  if [ ! -f "$file" ] || [ ! -r "$file" ]; then
    say unread "lock $file cannot be opened"
    return
  fi
  exec 9<"$file"
  if flock -w 10 9; then locked=1; else say busy 1; fi
}
base=/tmp locked=''
# Where every user may make files, and take nobody else's away: it is gone at a reboot, as the runs are.
if [ -n "$(find /run/lock -prune -type d -perm -1002 2>/dev/null)" ]; then base=/run/lock; fi
{
  this_boot=
  IFS= read -r this_boot </proc/sys/kernel/random/boot_id
  own='?'
  # shellcheck disable=SC2086 # $sudo is words, or nothing
  case $kind in
    none) owner_of </proc/self/cgroup && own=$owner ;;
    docker | podman)
      if text=$(bounded 3 $sudo "$kind" inspect --type container --format '{{.Id}}' "$id"); then
        own=$(printf %.12s "$text")
      fi
      ;;
    *) own=$id ;;
  esac
  say own "${own:-?}"
  say time "$(date +%s)"
  # Asked before the lock is taken: with a broken driver it may hang, and then holds up nobody else.
  if command -v nvidia-smi >/dev/null; then
    text=$(bounded 5 nvidia-smi "--query-gpu=$fields" --format=csv,noheader,nounits)
    status=$?
    say status $status
    printf '%s\n' "$text" | while IFS= read -r line; do say gpu "$line"; done
    case $status in
      124 | 137) text='' ;; # a second question would hang likewise
      *) text=$(bounded 5 nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits) ;;
    esac
    say apps $?
    printf '%s\n' "$text" | while IFS= read -r line; do say app "$line"; done
    for pid in $(printf '%s\n' "$text" | cut -d, -f2 | sort -un); do
      case $pid in *[!0-9]*) continue ;; esac
      owner='?' of=''
      if [ -r "/proc/$pid/cgroup" ]; then owner_of <"/proc/$pid/cgroup"; fi
      of=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^ORCH_RUN_ID=\([A-Za-z0-9._-]*\)$/\1/p' | head -n 1)
      user=$(stat -c %U "/proc/$pid")
      say process "$pid $owner ${user:-?} ${of:-?} $(tr '\0\n' '  ' <"/proc/$pid/cmdline" | cut -c 1-200)"
    done
  else
    say unread 'nvidia-smi it is not there'
  fi
  if [ "$mode" = claim ]; then lock; fi
  claims
} </dev/null 2>/dev/null
say 'done' 1
if [ -z "$locked" ]; then exit 0; fi
# A workstation that has vanished must not keep the lock.
(
  exec 9<&-
  sleep 30
  kill "$$"
) >/dev/null 2>&1 </dev/null &
watch=$!
uid=$(id -u)
dir=$base/orch-gpus-$uid
decision=
IFS= read -r decision
if [ "$decision" = take ]; then
  {
    if [ ! -e "$dir" ]; then (umask 022 && mkdir "$dir"); fi
    if [ -d "$dir" ] && [ ! -L "$dir" ] && [ -O "$dir" ]; then
      umask 022
      start_of "$$"
      # All in one write, of which a full disk is then known.
      text='' whole=''
      while IFS= read -r line; do
        if [ "$line" = end ]; then
          whole=1
          break
        fi
        text="$text$line
"
      done
      text="${text}owner $own
holder $$ $started
boot $this_boot"
      if [ -n "$whole" ] && printf '%s\n' "$text" >"$dir/.new-$$" &&
        mv -f "$dir/.new-$$" "$dir/claim-$kind-$id-$run"; then
        say taken 1
      else
        rm -f "$dir/.new-$$"
        say unread "claim it could not be written to $dir"
      fi
    else
      say unread "claim $dir is not a folder of this user"
    fi
  } 2>/dev/null
else
  say none 1
fi
kill "$watch" 2>/dev/null
exec 9<&-
say free 1
while IFS= read -r line; do :; done
