#!/bin/bash
# Builds the kernels for several shapes, checks them, and times them. Needs nvcc and a GPU.
#   dev/cuda/run.sh build|check|large|sanitize|micro|time|variants|compare|products|stretches|nvrtc|profile|peers ...
set -u
cd "$(dirname "$0")/../.."
out=dev/cuda/build
mkdir -p $out
arch="-gencode=arch=compute_90a,code=sm_90a"
# name | shape: H G Dk Dv l d l' n w | extra flags
shapes="default|12 2 64 64 32 16 64 16 512|
mma|12 2 64 64 32 16 64 16 512|-DMMA_SYNC
single|4 4 64 64 32 16 64 4 64|
five|10 2 128 128 16 8 64 5 100|
sixteen|16 1 64 64 32 16 64 8 128|
small|12 2 32 32 16 8 32 6 48|
wide|4 2 192 128 32 16 64 16 512|
query|12 2 64 64 32 16 64 16 512|-DUNION_TOKENS=1 -DUNION_WARPGROUPS=1
odd|12 2 64 64 32 16 48 10 200|
narrow|6 1 96 96 32 32 64 16 65|
paper|64 4 128 128 32 16 64 16 512|
widest|16 1 192 128 32 16 64 8 128|"
variants="v1|-DUNION_TOKENS=1 -DUNION_WARPGROUPS=1
c64|-DOUTER_CHUNK=64
c256|-DOUTER_CHUNK=256
u1|-DUNION_WARPGROUPS=1
b1|-DCMP_CHUNK=1024
b2|-DCMP_CHUNK=2048
b3|-DSEL_CHUNK=256
m4|-DMERGE_TOKENS=4"

wanted() { [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" $1 "* ]]; }  # ONLY="default c64": these builds and checks alone
flags() { echo "-DHEADS=$1 -DGROUPS=$2 -DDK=$3 -DDV=$4 -DCMP_L=$5 -DCMP_D=$6 -DSEL_L=$7 -DSEL_N=$8 -DWINDOW=$9"; }
cubins() {  # name, flags
  mkdir -p $out/$1
  for op in compressed select selected window combine joint; do
    echo "nvcc -std=c++17 -cubin $arch -Xptxas -v -lineinfo -Isrc/device/cuda $2 -o $out/$1/$op.cubin src/ops/attention/fused/$op.cu > $out/$1/$op.log 2>&1 || { echo FAILED $1/$op; grep error $out/$1/$op.log; }"
  done
}
build() {
  { echo "nvcc -std=c++17 -O3 -arch=sm_90 -o $out/check dev/cuda/check.cu"
    echo "nvcc -std=c++17 -O3 -arch=sm_90 -o $out/time dev/cuda/time.cu"
    echo "nvcc -std=c++17 -O3 $arch -Isrc/device/cuda -o $out/micro dev/cuda/micro.cu 2>/dev/null"
    while IFS='|' read -r name shape extra; do wanted $name && cubins $name "$(flags $shape) $extra"; done <<< "$shapes"
    while IFS='|' read -r name extra; do wanted $name && cubins $name "$extra"; done <<< "$variants"
  } | xargs -P "${JOBS:-16}" -I{} bash -c "{}"
  grep -h -E "C75|[1-9][0-9]* bytes spill stores" $out/default/*.log
}
for what in "$@"; do
  case $what in
    build) build ;;
    check) while IFS='|' read -r name shape extra; do wanted $name || continue; timeout 45 $out/check $out/$name $shape "${SEED:-1}" > $out/check-$name.txt 2>&1 || echo "$name: exit $?"; tail -3 $out/check-$name.txt; grep -m6 -E "FAIL|bad" $out/check-$name.txt; done <<< "$shapes" ;;
    large) LARGE=1 timeout 200 $out/check $out/default 12 2 64 64 32 16 64 16 512 "${SEED:-1}" ;;
    sanitize) for tool in memcheck racecheck; do SMALL=1 timeout 150 compute-sanitizer --tool $tool $out/check $out/default 12 2 64 64 32 16 64 16 512 3 2>&1 | tail -6; done ;;
    micro) timeout 60 $out/micro ;;
    time) timeout 120 $out/time $out/default 12 2 64 64 32 16 64 16 512 default ;;
    variants) timeout 60 $out/time $out/mma 12 2 64 64 32 16 64 16 512 mma
      timeout 60 $out/time $out/v1 12 2 64 64 32 16 64 16 512 v1 union
      timeout 60 $out/time $out/u1 12 2 64 64 32 16 64 16 512 u1 union,local
      for v in b1 b2 b3; do timeout 60 $out/time $out/$v 12 2 64 64 32 16 64 16 512 $v "cmp_backward,sel_backward,backward,backward ordered"; done ;;
    # Builds of the default shape beside each other, twice, in turn: what one gains must show in both rounds.
    compare) for round in 1 2; do for v in ${ONLY:-default mma}; do
        timeout 60 $out/time $out/$v 12 2 64 64 32 16 64 16 512 "$v" "compressed,select,index to choice,window,dense,adaptive union,adaptive dense,adaptive outer,forward adaptive,cmp_dq,win_dq,backward"; done; done ;;
    products) nvcc -std=c++17 -O2 -x cu -arch=sm_90 -o $out/products dev/cuda/products.cpp -ldl
      for folder in /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib $(python3 -c 'import site; print(" ".join(p + "/nvidia/cu13/lib" for p in site.getsitepackages()))' 2>/dev/null); do
        [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:$folder"; done
      export LD_LIBRARY_PATH; timeout 120 $out/products $out/products.json ;;
    stretches) for v in default c64 c256; do for n in 2048 4096 8192 16384; do
        STRETCH=$n timeout 60 $out/time $out/$v 12 2 64 64 32 16 64 16 512 "$v/$n" select,outer,outer+combine; done; done ;;
    nvrtc) g++ -std=c++17 -O1 -o $out/nvrtc dev/cuda/nvrtc.cpp -ldl
      lib=$(ls /usr/local/cuda*/lib64/libnvrtc.so.13 /usr/local/cuda*/targets/*/lib/libnvrtc.so.13 $(python3 -c 'import site; print(" ".join(p + "/nvidia/cu13/lib/libnvrtc.so.13" for p in site.getsitepackages()))' 2>/dev/null) 2>/dev/null | head -1)
      timeout 200 $out/nvrtc "${lib:-libnvrtc.so}" ;;
    profile) PROFILE=${SEQUENCES:-1} timeout 200 ncu --clock-control none --set detailed --import-source no $out/time $out/default 12 2 64 64 32 16 64 16 512 default > $out/profile.txt 2>&1 ;;
    peers) timeout 100 python3 bench/peers/cuda/attention_torch.py ;;
  esac
done
