# shell: {python} /srv/elsewhere/train.py
