"""What can go wrong when Megatron is patched. Each message stands on its own."""


class PatchError(RuntimeError):
    """A patch was refused or could not be undone."""


class UnsupportedVersionError(PatchError):
    """The installed megatron-core is outside the versions a target is known in."""


class MissingTargetError(PatchError):
    """The installed Megatron has no such module or attribute."""


class SignatureError(PatchError):
    """A target lacks a parameter that our wrapper passes or reads."""


class FingerprintError(PatchError):
    """The source that a wrapper relies on is not one that it was written for."""


class ForeignPatchError(PatchError):
    """Someone else has replaced the target already."""


class ConflictError(PatchError):
    """Two owners claim one target."""


class AlreadyAppliedError(PatchError):
    """Everything claimed is applied already."""


class UndoError(PatchError):
    """Something of ours was replaced by someone else, so it could not be put back."""


class BoundaryError(PatchError):
    """Pipeline boundaries do not fit the model, its stages or what the run does with them."""
