# shell: accelerate-launch-of-old train.py --steps 5
