# shell: printf '\177ELFnothing' >program && chmod +x program && exec ./program
