"""vLLM-Omni by its documented interface: the text of models that also speak or draw."""
