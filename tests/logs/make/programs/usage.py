import argparse

parser = argparse.ArgumentParser(prog="train.py")
parser.add_argument("--steps", type=int, required=True)
parser.parse_args(["--step-count", "5"])
