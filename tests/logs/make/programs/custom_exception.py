class PlannerError(Exception):
    pass


def plan(devices):
    if devices % 3:
        raise PlannerError("7 devices cannot be split in 3 stages\n  stage 0: 3\n  stage 1: 3\n  stage 2: 1")


try:
    plan(7)
except PlannerError as error:
    raise RuntimeError("no plan") from error
