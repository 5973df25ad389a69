#!/usr/bin/env bash
# Train the forms of smol-moe, and study each on questions and text as soon as it is there.
#
#   KNN_MOE_DATA=DATA experiments/smol_study.sh OUT STUDY MINUTES [train_smol_moe.py's options]
#
# Models go to OUT and runs to STUDY, both made if they are not there. No run begins later than
# MINUTES after the start; the same command again makes what is missing. Fifteen processes share one
# GPU (90 GB), under NVIDIA's Multi-Process Service where it can be started.
set -euo pipefail
out=$(realpath -m "$1") study=$(realpath -m "$2") minutes=$3
shift 3
[ -z "${KNN_MOE_DATA:-}" ] || KNN_MOE_DATA=$(realpath "$KNN_MOE_DATA")
cd "$(dirname "$0")/.."
mkdir -p "$out" "$study"
export KNN_MOE_EMBEDDING=own OMP_NUM_THREADS=1 # no embedding model is needed
nvidia-cuda-mps-control -d 2> /dev/null || echo "No Multi-Process Service: the processes take turns."

# The form that has been studied least comes first.
recipes=() trainer=
for form in smol-moe-coarse smol-moe smol-moe-shared; do
  [ -e "$out/$form/tokenizer_config.json" ] || recipes+=("experiments/recipes/$form.json")
done
if [ ${#recipes[@]} -gt 0 ]; then
  python3 experiments/train_smol_moe.py "${recipes[@]}" --out "$out" "$@" > "$study/training.log" 2>&1 &
  trainer=$!
fi

# slice NAME FORM JOBS OPTIONS: wait for a form; make runs of it in a folder of their own.
slice() {
  local name=$1 form=$2 jobs=$3
  shift 3
  until [ -e "$out/$form/tokenizer_config.json" ]; do
    if ! kill -0 "$trainer" 2> /dev/null || [ "$SECONDS" -gt $((minutes * 60)) ]; then
      echo "There is no $form, so $name is left out: see $study/training.log"
      return
    fi
    sleep 1
  done
  knn-moe reproduce pretrained --model "$out/$form" -o "$study/$name" --jobs "$jobs" \
    --batch-tokens 16384 --build-tokens 4096 --no-tables --minutes "$(awk "BEGIN { print $minutes - $SECONDS / 60 }")" \
    "$@" >> "$study/$name.log" 2>&1 || echo "$name failed: see $study/$name.log"
}

tasks() { printf -- '-t %s ' "$@"; }
methods() { printf -- '-m %s ' "$@"; }
asked=$(methods zero-shot knn-lm knn-calibrated sft-router-choices)
read=$(methods zero-shot knn-lm knn-calibrated knn-calibrated+head sft-router)
first="sciq arc_easy commonsenseqa boolq openbookqa"
rest="hellaswag piqa arc_challenge medmcqa mmlu usmle"
texts="text_medical text_sql text_gsm8k text_mbpp text_hellaswag"

for form in coarse shared; do
  slice $form-questions smol-moe-$form 3 --part accuracy $asked $(tasks $first $rest) --one-rate &
  slice $form-text smol-moe-$form 1 --part text $read $(tasks $texts) --one-rate &
done
slice fine-first smol-moe 3 --part together --part accuracy --part transfer $asked \
  $(tasks $first text_medical text_sql) &
slice fine-rest smol-moe 2 --part accuracy $asked $(tasks $rest) &
slice fine-growth smol-moe 1 --part growth $asked $(tasks commonsenseqa) &
slice fine-others smol-moe 1 --part accuracy --one-rate $(tasks $first hellaswag piqa) \
  $(methods 5-shot knn-paper knn-distilled sft sft-router) &
wait
