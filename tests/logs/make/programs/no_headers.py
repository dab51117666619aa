# shell: printf '#include <Python.h>\nint main(void) {{ return 0; }}\n' >launcher.c; cc launcher.c -o launcher; echo "RuntimeError: the launcher was not built" >&2; exit 1
