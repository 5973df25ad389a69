"""`python -m knn_moe.harness`: lm-evaluation-harness with the model of evaluation/lm_eval.py."""

from knn_moe.evaluation.lm_eval import main

if __name__ == "__main__":
    main()
