# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# NCCL: how it connects nodes is said, and sockets beside adapters end the job.

# NCCL writes one file a process into the run's folder. A log that somebody asked for stays as it is.
log_nccl() {
  [ -z "${!NCCL_DEBUG*}" ] && [ -d "$FSDPPLAN_RUN_FOLDER" ] || return 0
  export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET
  export NCCL_DEBUG_FILE="${FSDPPLAN_RUN_FOLDER//%/%%}/nccl.%h.%p.log"
}

# What channels from other nodes come in by, and libfabric's providers, as this start's files have
# it: each line once, behind its count. A few nodes are enough: NCCL takes one network on all.
nccl_ways() {
  local file found=()
  for file in "$FSDPPLAN_RUN_FOLDER"/nccl.*.log; do
    [ "$file" -nt "$FSDPPLAN_RUN_FOLDER/attempts.jsonl" ] || continue
    found+=("$file")
    [ "${#found[@]}" -lt 64 ] || break
  done
  [ "${#found[@]}" -gt 0 ] || return 0
  sed -nE -e 's/.* NCCL INFO NET\/OFI Selected [Pp]rovider is ([^ ,;]+).*/provider \1/p' -e \
    's/.* NCCL INFO Channel .* \[receive\] via NET\/([^/]+)\/[0-9]+(\([0-9]+\))?(\/GDRDMA)?.*/\1\3/p' \
    "${found[@]}" 2>/dev/null | sort | uniq -c | sed 's/^ *//'
}

# Whether those ways are plain TCP, under whichever name.
are_sockets() {
  local providers
  case "$1" in *' Socket'* | *' FastSocket'*) return 0 ;; *Libfabric*) ;; *) return 1 ;; esac
  providers=$(sed -n 's/^[0-9]* provider //p' <<<"$1")
  [ -n "$providers" ] && ! grep -qvxE 'tcp|sockets|net' <<<"$providers"
}

# judge_nccl WAYS: says what they come to; fails where they are reason enough to end the job.
judge_nccl() {
  local all host said
  all=$(sed -n '/^[0-9]* provider /!s/^\([0-9]*\) \(.*\)/\2 (\1)/p' <<<"$1" | paste -sd,)
  [ -n "$all" ] || return 0
  echo "fsdpplan: NCCL connects nodes by ${all//,/, }" >&2
  if are_sockets "$1"; then
    [ -n "$adapters" ] || return 0
    said="NCCL carries traffic between nodes over sockets although $adapters: look for"
    said+=" NCCL_IB_DISABLE and NCCL_NET, at ibv_devinfo, and whether a container has /dev/infiniband"
    if [ -n "${FSDPPLAN_ALLOW_SOCKETS:-}" ]; then
      echo "fsdpplan: warning: $said" >&2
    else
      echo "fsdpplan: $said; with FSDPPLAN_ALLOW_SOCKETS=1 exported it trains on anyway" >&2
      return 1
    fi
  elif [ -n "$gpudirect" ] && host=$(grep -vE ' provider |/GDRDMA$' <<<"$1" | paste -sd,); then
    [ -n "$host" ] || return 0
    echo "fsdpplan: warning: what comes by ${host#* } passes through host memory although the plan" \
      "counts on GPUDirect: look for nvidia_peermem in lsmod (AMD: for amdkfd), or for DMA-BUF" >&2
  fi
}

# Looks until nothing new is connected, and says what there is; then the job's shell is told, where
# it has to end. It stays until that shell ends it, with 143 where it has not judged: a child that
# ends while a signal comes may leave bash no exit code (seen: 5.2).
watch_nccl() {
  log_nccl
  (
    before='' nap='' over='' judged=''
    # At once, not after the nap: whoever reads what the job says waits for this shell, too.
    trap 'over=yes; [ -z "$nap" ] || kill "$nap" 2>/dev/null || true' TERM
    while [ -z "$over" ] && kill -0 $$ 2>/dev/null; do
      sleep 10 >/dev/null 2>&1 &
      nap=$!
      [ -z "$over" ] || kill "$nap" 2>/dev/null || true
      wait "$nap" || true
      nap=''
      [ -z "$over$judged" ] || continue
      ways=$(nccl_ways)
      if are_sockets "$ways" || { [ -n "$ways" ] && [ "$ways" = "$before" ]; }; then
        judged=yes
        judge_nccl "$ways" || [ -n "$over" ] || kill -USR2 $$
      fi
      before=$ways
    done
    [ -n "$judged" ] || exit 143
  ) &
  nccl_watcher=$!
}
# What ended by itself keeps its exit code.
trap 'passed_on=1; [ -z "${nccl_watcher:-}" ] || stop 5' USR2

# A start may be over before it was looked at.
followed() {
  local code watcher=${nccl_watcher:-}
  nccl_watcher=''
  [ -n "$watcher" ] || return 0
  kill "$watcher" 2>/dev/null || true
  await "$watcher" 2>/dev/null
  [ "$code" != 143 ] || judge_nccl "$(nccl_ways)" || true
}
