# shell: {python} -m trainer_of_mine train settings.yaml
