# Interrupts what a command at the place has started, as: sh -c THIS orch-interrupt SIGNAL PID
# Closing a channel without a terminal ends nothing there.
signal=$1
tree() {
  for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
    (tree "$child")
    kill -s "$signal" "$child" 2>/dev/null
  done
}
tree "$2"
