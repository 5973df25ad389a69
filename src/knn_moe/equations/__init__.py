"""The paper's formulas, one pure function each. Imports torch and nothing of ours."""
