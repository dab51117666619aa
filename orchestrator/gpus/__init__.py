"""Which GPUs of a host are whose: claims by UUID under a lock on the host, so that two containers see each other's.

`model` has the words, `decide` what follows from a reading (pure), `read` asks the host, `step` is a launch's.
"""
