# Runs at the place, as: sh -c THIS orch-enter NONCE DIGEST SIZE ROOT PYTHON   (the last two may be empty)
# Finds the root and a Python, takes the remote programs from stdin where they are missing, and becomes their server.
# Every answer stands on a line behind the nonce.
nonce=$1 digest=$2 size=$3 root=$4 python=$5
umask 077
LC_ALL=C
export LC_ALL
PATH=${PATH:-/usr/bin:/bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { printf '%s %s %s\n' "$nonce" "$1" "$2"; }
printf '\n'
uid=$(id -u)
user=
while IFS=: read -r name secret number group gecos home shell; do
  if [ "$number" = "$uid" ]; then
    user=$name
    HOME=${HOME:-$home}
    break
  fi
done 2>/dev/null </etc/passwd
if [ -z "${HOME:-}" ]; then HOME=$(getent passwd "$uid" 2>/dev/null | cut -d: -f6); fi
HOME=${HOME:-/}
case $root in
  '') if [ "$uid" = 0 ]; then root=/var/lib/orch; else root=$HOME/.local/share/orch; fi ;;
  '~/'*) root=$HOME/${root#'~/'} ;;
esac
say enter.root "$root"
PATH=$PATH:$HOME/.local/bin
for folder in /opt/*/bin; do
  if [ -d "$folder" ]; then PATH=$PATH:$folder; fi
done
cd /

bounded() {
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$@"; else shift; "$@"; fi
}
seen=
# Prints nothing: sets `found` to the real path of the interpreter when it is good enough.
try() {
  answer=$(bounded 5 "$1" -IS -c \
    'import sys; print(sys.version_info >= (3, 8), "%d.%d.%d" % sys.version_info[:3], sys.executable or "?")' \
    2>/dev/null </dev/null) || return 1
  case $answer in
    'True '*/*) found=/${answer#*/} ;;
    'False '*)
      answer=${answer#False }
      seen="$seen ${answer%% *}"
      return 1
      ;;
    *) return 1 ;;
  esac
}
found=
if [ -n "$python" ]; then
  try "$python" || say python.given "$python"
else
  for minor in '' .14 .13 .12 .11 .10 .9 .8; do
    at=$(command -v "python3$minor" 2>/dev/null) || continue
    if try "$at"; then break; fi
  done
fi
if [ -z "$found" ]; then
  say python.seen "$seen"
  say enter.kernel "$(uname -srm)"
  if [ -r /etc/os-release ]; then
    while IFS= read -r line; do
      case $line in PRETTY_NAME=*) say enter.system "${line#PRETTY_NAME=}" ;; esac
    done </etc/os-release
  fi
  for manager in apt-get dnf apk zypper pacman; do
    if command -v "$manager" >/dev/null 2>&1; then say enter.manager "$manager"; fi
  done
  say nopython 1
  exit 0
fi
say enter.python "$found"

short=$(printf '%.12s' "$digest")
app=$root/bin/orch-$short.pyz
set -- env -i "HOME=$HOME" "USER=$user" "LOGNAME=$user" "PATH=$PATH" LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONUTF8=1 TERM=linux \
  ${TMPDIR:+"TMPDIR=$TMPDIR"} "$found" -IS -X utf8
# The size tells a file that a crash of the machine cut short.
if [ -f "$app" ] && [ "$(wc -c <"$app")" -eq "$size" ]; then exec "$@" "$app" serve "$nonce" "$root"; fi
say need "$size"
exec "$@" -c '
import hashlib, os, sys
nonce, digest, size, app, root = sys.argv[1:]

def fail(text):
    os.write(1, ("\n%s error %s\n" % (nonce, " ".join(text.split()))).encode("utf-8", "replace"))
    sys.exit(0)

# Exactly as many bytes as announced: the frames that follow belong to the server.
data = b""
while len(data) < int(size):
    piece = os.read(0, int(size) - len(data))
    if not piece:
        sys.exit(0)
    data += piece
if hashlib.sha256(data).hexdigest() != digest:
    fail("the program sent there arrived damaged (%d bytes)" % len(data))
temporary = "%s.%d.tmp" % (app, os.getpid())
try:
    os.makedirs(root, 0o700, exist_ok=True)
    os.makedirs(os.path.dirname(app), 0o700, exist_ok=True)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, app)
except OSError as error:
    try:
        os.unlink(temporary)
    except OSError:
        pass
    fail("%s cannot be written: %s" % (root, error.strerror))
try:
    os.execv(sys.executable, [sys.executable, "-IS", "-X", "utf8", app, "serve", nonce, root])
except OSError as error:
    fail("%s cannot be started: %s" % (app, error.strerror))
' "$nonce" "$digest" "$size" "$app" "$root"
