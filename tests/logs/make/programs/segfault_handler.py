# shell: env PYTHONFAULTHANDLER=1 {python} {file}
import ctypes

ctypes.string_at(0)
