# shell: mkdir -p out && chmod 755 out && setpriv --reuid 65534 --regid 65534 --clear-groups {python} {file}
print("step 50 loss 1.7")
open("out/step-50.pt", "wb")
