# As step.c, by a shell, its subshells and a pipeline between them.
steps=$1
nonce=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
step() {
    awk -v n="$1" -v nonce="$nonce" 'BEGIN { for (i = 1; i <= n; i++) sum += 1 / i; printf "%s %d %.17g ", nonce, n, sum }'
}
produce() {
    value=$((16#$nonce))
    for ((n = 1; n <= steps; n++)); do
        value=$((value * 6364136223846793005 + 1))
        printf '%d %016x\n' "$n" "$value"
        sleep 0.002
    done
}
produce | cat | while read -r n value; do
    echo "$(step "$n")$value"
done
exit 7
