"""Lists what makers of models, media and packages try."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut

TEMPLATES = "unit/frontend/prompts/test_templates.py"
SANDBOX = "frontend/prompts/templates.py"

ATTEMPTS = (
    Attempt(
        "C3",
        "M",
        "a template with 3,000 nested brackets: all frontends crash at each start",
        "the model is refused",
        (f"{TEMPLATES}::test_a_template_that_cannot_be_compiled_makes_its_model_unusable",),
        "a RecursionError of the compiler is not foreseen",
        (
            Cut(
                "frontend/prompts/templates.py",
                "except (jinja2.TemplateError, ValueError, RecursionError, MemoryError, SyntaxError) as error:",
                "except jinja2.TemplateError as error:",
            ),
        ),
    ),
    Attempt(
        "H6",
        "M",
        "24 templates that want memory or time when they are rendered",
        "refused, under 400 MiB",
        (f"{TEMPLATES}::test_a_template_that_would_take_the_memory_is_stopped",),
        "widths and indents are not looked at",
        (Cut("frontend/prompts/templates.py", "if isinstance(value, int | float) and abs(value) > most:", "if False:"),),
    ),
    Attempt(
        "H6",
        "M",
        "the same when they are compiled",
        "nothing is computed then",
        (f"{TEMPLATES}::test_nothing_of_a_template_is_computed_while_it_is_compiled",),
        "constants are computed while compiling, as at the time of the audit",
        (
            Cut(SANDBOX, "self.optimized = False", "self.optimized = True"),
            Cut(SANDBOX, "code_generator_class = _NothingComputed", "code_generator_class = CodeGenerator"),
            Cut(
                SANDBOX, 'intercepted_binops = frozenset({"*", "**", "%", "+"})', 'intercepted_binops = frozenset({"*", "**"})'
            ),
        ),
    ),
    Attempt(
        "H6",
        "M, P",
        "a file of another digest or size than its card says",
        "not used",
        ("unit/broker/models/test_directory.py::test_a_file_that_is_not_what_its_card_says_is_not_used",),
        "digests are not compared",
        (
            Cut(
                "broker/models/directory.py",
                "if len(data) != file.size or await sha256_hex(data) != file.digest:",
                "if len(data) != file.size:",
            ),
        ),
    ),
    Attempt(
        "H6",
        "M",
        "a model, tokenizer or draft model from elsewhere, or by a link out of an allowed folder",
        "the start ends with code 78 and names it",
        (
            "unit/workers/test_settings.py::test_rules_allow_kinds_and_what_lies_below_places",
            "unit/workers/test_settings.py::test_what_an_engines_settings_have_it_load_is_held_to_the_same_rules",
        ),
        "the rules are not asked",
        (Cut("workers/settings.py", "if not any(allows(rule, kind, address) for rule in rules):", "if False:"),),
    ),
    Attempt(
        "H6",
        "M",
        "weights, or an adapter, that are pickles",
        "refused before an engine reads them",
        (
            "unit/workers/test_model_files.py::test_a_folder_of_pickles_is_refused",
            "unit/workers/test_adapter_source.py::test_files_that_may_run_code_are_refused",
        ),
        "names of files are not looked at",
        (
            Cut("workers/model_files.py", "if pickled := sorted(", "if pickled := ([], sorted)[0] and sorted("),
            Cut("workers/adapter_source.py", "if path.suffix in _RUNS_CODE:", "if False:"),
        ),
    ),
    Attempt(
        "H6",
        "P",
        "a snapshot of the index with other bytes than its pointer says",
        "not used, the index begins anew",
        ("unit/router/test_unusable.py::test_a_snapshot_that_is_not_the_one_its_pointer_names_is_not_used",),
        "digests are not compared",
        (Cut("router/index/snapshot.py", "if digest.hexdigest() != kept.digest:", "if False:"),),
    ),
    Attempt(
        "M6",
        "S",
        "another file under the name and version of a package",
        "pip compares digests",
        ("docs/test_lock.py::test_pip_is_told_to_compare_the_digests",),
        "pip is not told to",
        (
            Cut(
                "deploy/install.py",
                'pip("--no-deps", "--require-hashes", "-r", f"{LOCK}/{lock}.txt")',
                'pip("--no-deps", "-r", f"{LOCK}/{lock}.txt")',
            ),
        ),
    ),
    Attempt(
        "M6",
        "S",
        "a package with known weaknesses; an audit that reaches no database",
        "`make audit` in CI names it; not passed",
        ("unit/deploy/package/test_audit.py::test_an_audit_that_could_not_be_made_is_neither_passed_nor_a_finding",),
        "findings, and an audit that was not made, end with code 0",
        (
            Cut("deploy/package/audit.py", "code = FOUND", "code = 0"),
            Cut("deploy/package/audit.py", "code = code or NOT_AUDITED", "code = 0"),
        ),
    ),
    Attempt(
        "L4",
        "T",
        "another image with the name of one that an engine has computed",
        "engines get 128 bits (routing hashes have 64), and a salt of the tenant",
        ("unit/frontend/media/test_loader.py::test_what_engines_call_an_item_by_has_128_bits",),
        "names have 64 bits",
        (
            Cut(
                "frontend/prompts/media.py",
                "return hashlib.blake2b(data, digest_size=16).hexdigest()",
                "return hashlib.blake2b(data, digest_size=8).hexdigest()",
            ),
        ),
    ),
    Attempt(
        "input",
        "N, T, P",
        "a corpus and mutations of it at every decoder",
        "refused or read, and nothing else",
        ("fuzz/test_corpus.py::test_a_decoder_reads_its_corpus_and_what_is_like_it",),
        "a RecursionError of a decoder is not foreseen",
        (Cut("broker/codec.py", "UnicodeDecodeError, RecursionError, OverflowError)", "UnicodeDecodeError, OverflowError)"),),
    ),
    Attempt(
        "input",
        "T",
        "prompt embeddings that are a pickle with code",
        "400, nothing of it runs",
        ("unit/workers/test_prompt_embeds.py::test_anything_else_is_refused_and_never_called",),
        "it is unpickled",
        (Cut("broker/torch_tensors.py", "layout = _layout(record(", 'layout = __import__("pickle").loads(record('),),
    ),
)
