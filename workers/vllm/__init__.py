"""vLLM as an engine. `import vllm` in here is the real package; it is imported only when an engine is started."""
