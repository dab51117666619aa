"""Makes torch.compile bearable for a trainer whose workers are threads of one process.

torch's compile stack shares state between the threads of a process: a flag that says "somebody is tracing" and makes
every compiled call fail, patches of nn.Module, and a lock that two threads on one GPU can wait for in a ring. One
process a GPU has none of this, and is what to use where there is a choice. For a trainer that has to use threads:

    guard = compile_guard.install()            # once, before anything is compiled

    def worker(device):
        with guard.thread(device):             # each training thread, with the device that it trains on
            for batch in one_of_each_shape:
                guard.warm(step, batch)        # forward and backward; one thread at a time
            guard.seal(threads=8)              # waits for all eight; from here on a recompilation is an error
            for batch in batches:
                step(batch)
                guard.check()                  # raises if the process is poisoned

This package needs torch and nothing else of the trainer, save `trainer.dense_guard` where `install(dense=True)` asks
for it. docs/compile.md tells what can go wrong without it.
"""

from trainer.compile_guard.guard import CompileGuardError, Guard, PoisonedError, install, remove

__all__ = ["CompileGuardError", "Guard", "PoisonedError", "install", "remove"]
