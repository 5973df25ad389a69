"""lm-evaluation-harness with a memory: `python -m knn_moe.harness`, see evaluation/lm_eval.py."""

from knn_moe.evaluation.lm_eval import main

if __name__ == "__main__":
    main()
