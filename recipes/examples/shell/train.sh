# Any program is a trainer; this one is sh. Lines in $ORCH_METRICS give it progress and throughput.
set -eu
loss=1000
step=0
while [ "$step" -lt "$1" ]; do
    step=$((step + 1))
    loss=$((loss * 9 / 10))
    printf '{"step": %d, "loss": %d, "tokens": 1, "time": %s}\n' "$step" "$loss" "$(date +%s.%N)" >>"$ORCH_METRICS"
    echo "step $step loss $loss"
done
echo "$loss" >"$ORCH_RUN_DIR/loss.txt"
