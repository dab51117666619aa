import logging

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
log = logging.getLogger("trainer")
log.info("will restart the loader on RuntimeError: DataLoader worker (pid 5) is killed by signal: Killed.")
for step in range(1, 25):
    log.info("step %d loss %.4f", step, 4 / step)
    if step == 9:
        log.warning("torch.OutOfMemoryError: CUDA out of memory while probing batch 64; reducing the batch to 32")
        log.warning("NCCL INFO error counters: 0, Timeout 0")
log.info("checkpoint written; 0 errors, 0 failed")
