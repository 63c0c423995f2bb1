"""What was moved and decoded, and where a transport was wanted and not used."""

from dataclasses import asdict, dataclass, field


@dataclass
class Figures:
    transport: str
    encoded_bytes: int = 0
    decoded_bytes: int = 0
    read_seconds: float = 0.0
    check_seconds: float = 0.0
    decode_seconds: float = 0.0
    scratch_bytes: int = 0
    fallback: str | None = None

    @property
    def ratio(self) -> float | None:
        """Decoded bytes for each byte that was read."""
        return self.decoded_bytes / self.encoded_bytes if self.encoded_bytes else None


@dataclass
class Report:
    tensors: dict[str, Figures] = field(default_factory=dict)

    def total(self) -> dict:
        """Sums over all tensors; scratch memory is the most that one tensor took, as each gives its own back."""
        all_of = list(self.tensors.values())
        sums = ("encoded_bytes", "decoded_bytes", "read_seconds", "check_seconds", "decode_seconds")
        total = {key: sum(getattr(figures, key) for figures in all_of) for key in sums}
        total["ratio"] = total["decoded_bytes"] / total["encoded_bytes"] if total["encoded_bytes"] else None
        total["scratch_bytes"] = max((figures.scratch_bytes for figures in all_of), default=0)
        total["transports"] = {name: sum(f.transport == name for f in all_of) for name in {f.transport for f in all_of}}
        total["fallbacks"] = {name: figures.fallback for name, figures in self.tensors.items() if figures.fallback}
        return total

    def as_dict(self) -> dict:
        tensors = {name: asdict(figures) | {"ratio": figures.ratio} for name, figures in self.tensors.items()}
        return {"tensors": tensors, "total": self.total()}
