"""The artefact: its layers, its manifest and card, its files, and how they are written."""
