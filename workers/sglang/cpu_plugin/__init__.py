"""Makes SGLang's CUDA wheel run on a machine without a GPU, through SGLang's own plug-in entry points.

THIS FOLDER IS FOR MACHINES WITHOUT A GPU ONLY. SGLang publishes no wheel for them: its wheel expects CUDA kernels, pinned
memory and GPU packages, of which a small text model on `attention_backend="torch_native"` needs none. Nothing in SGLang's
files is changed, and on a machine with a GPU nothing of this is loaded.

`missing_packages` stands in for packages that SGLang imports without using them here; it has to run before `import sglang`.
`hooks` registers everything else; SGLang calls it in each of its processes (entry point `sglang.srt.plugins`).
"""
