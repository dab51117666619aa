# Runs one command at the place, as: sh -c THIS orch-exec NONCE CODING DIRECTORY ARGUMENT...
# The command's output stands between marks on both streams; the last mark holds its exit status.
# CODING is "plain", or "octal" where arguments hold bytes that do not survive the way: each is then printf %b's input.
# An empty DIRECTORY is home. Names begin with orch_, since the command inherits the environment.
orch_nonce=$1 orch_coding=$2 orch_directory=$3
shift 3
if [ "$orch_coding" = octal ]; then
  # Bytes, not characters, whatever the locale; the command gets it back as it was.
  orch_locale=${LC_ALL-unset}
  LC_ALL=C
  orch_left=$#
  while [ "$orch_left" -gt 0 ]; do
    # The x keeps newlines at the end, which command substitution would take away.
    orch_value=$(printf '%bx' "$1")
    shift
    set -- "$@" "${orch_value%x}"
    orch_left=$((orch_left - 1))
  done
  if [ "$orch_locale" = unset ]; then unset LC_ALL; else LC_ALL=$orch_locale; fi
fi
if [ -z "${HOME:-}" ]; then
  orch_uid=$(id -u)
  while IFS=: read -r orch_name orch_secret orch_number orch_group orch_gecos orch_home orch_shell; do
    if [ "$orch_number" = "$orch_uid" ]; then
      HOME=$orch_home USER=${USER:-$orch_name} LOGNAME=${LOGNAME:-$orch_name}
      export USER LOGNAME
      break
    fi
  done 2>/dev/null </etc/passwd
fi
HOME=${HOME:-/}
PATH=${PATH:-/usr/bin:/bin}
# An older pct enters with a PATH of its own, which lacks these.
case :$PATH: in *:/usr/local/bin:*) ;; *) PATH=/usr/local/sbin:/usr/local/bin:$PATH ;; esac
LANG=${LANG:-C.UTF-8}
export HOME PATH LANG
cd "${orch_directory:-$HOME}" 2>/dev/null || cd /
printf '[%s begin %d]' "$orch_nonce" "$$"
printf '[%s begin %d]' "$orch_nonce" "$$" >&2
# What this shell itself would say of a command killed by a signal is nobody's output.
exec 9>&2 2>/dev/null
# A subshell that becomes the command: never a builtin of this shell's, and its end is seen here.
case $1 in
  -*) (exec 2>&9 9>&- && exec env -- "$@") ;; # exec takes options in some shells, and no -- in others
  *) (exec 2>&9 9>&- && exec "$@") ;;
esac
orch_status=$?
printf '[%s end %03d]' "$orch_nonce" "$orch_status"
printf '[%s end %03d]' "$orch_nonce" "$orch_status" >&9
