"""Declares the settings of batches. Durations are in seconds, sizes in bytes."""

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from headrace.base.setting import Setting, check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of batches in one frontend. Raises ValueError naming the setting and its value."""

    window_lines: Annotated[
        int, Setting("Most lines of all batches of a model that are stored as jobs and have no result yet.", least=1)
    ] = 1024
    max_lines: Annotated[int, Setting("Most lines of a batch.", least=1)] = 50_000
    max_file_bytes: Annotated[int, Setting("Largest input file.", least=1, most=4_000_000_000, metavar="BYTES")] = (
        200 * 1024 * 1024
    )
    max_inputs: Annotated[int, Setting("Most inputs of all lines of an embeddings batch.", least=1)] = 50_000
    copied_bytes: Annotated[
        int,
        Setting(
            "Most bytes that one frontend keeps in its temporary folder for the batches that it runs: copies of input files, "
            "and lines of result files; others are read from the broker again, which costs it more. 0: none.",
            least=0,
            metavar="BYTES",
        ),
    ] = 2 * 1024 * 1024 * 1024
    tenant_batches: Annotated[int, Setting("Batches of a tenant that have not ended.", least=1)] = 100
    tenant_batches_per_hour: Annotated[int, Setting("Batches that a tenant may create in an hour.", least=1)] = 2000
    tenant_lines: Annotated[int, Setting("Lines without a result in all batches of a tenant.", least=1)] = 500_000
    tenant_prompt_tokens: Annotated[
        int, Setting("Estimated prompt tokens of those lines, at four bytes a token; 0: no limit.", least=0)
    ] = 0
    keep_s: Annotated[float, Setting("How long the record of a batch is kept after its end.", least=3600)] = 30 * 86_400.0
    output_ttl_s: Annotated[
        float, Setting("How long its files are kept where its creator names no other time.", least=3600)
    ] = 30 * 86_400.0
    webhook_url: Annotated[str | None, Setting("Where the ends of batches are posted to; none: nowhere.", metavar="URL")] = None
    webhook_secret: Annotated[str | None, Setting("Signs them, by the rules of Standard Webhooks.", secret=True)] = None
    webhook_tries: Annotated[int, Setting("Tries to post one, the waits between them growing to an hour.", least=1)] = 12

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.webhook_url is None:
            return
        parts = urlsplit(self.webhook_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"webhook_url must be an http or https URL, got {self.webhook_url[:100]!r}")
