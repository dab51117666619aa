# shell: printf 'def train(:\n    pass\n' >model.py && {python} -c "import model"
