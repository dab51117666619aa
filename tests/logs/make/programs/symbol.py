# shell: printf 'extern int nothing(void); int answer(void) {{ return nothing(); }}' >a.c && cc -shared -fPIC a.c -o liba.so && {python} {file}
import ctypes

print("loading the kernels")
try:
    ctypes.CDLL("./liba.so", mode=2)
except OSError as error:
    raise ImportError(
        f"/srv/env/lib/python3.11/site-packages/attention/_C.so: {str(error).rpartition(': ')[0]}: {str(error).rpartition(': ')[2]}"
    ) from None
