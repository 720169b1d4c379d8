"""Whether two models mean the same tokens by the same ids, as a teacher and its student must."""

from __future__ import annotations

from rlhf_suite.config.data import RenderConfig
from rlhf_suite.config.teacher import TeacherConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import Tokenizer, load_tokenizer


def check_teacher(student: Tokenizer, teacher: TeacherConfig, data: RenderConfig) -> None:
    """`check_same_vocabulary` with the teacher's own tokenizer."""
    path = teacher.model_name_or_path
    assert path is not None
    check_same_vocabulary(student, load_tokenizer(path, data, "teacher.model_name_or_path"), path)


def check_same_vocabulary(student: Tokenizer, teacher: Tokenizer, path: str) -> None:
    """Refuse a teacher whose token ids mean other tokens than the student's."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    other = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
    raise UserError(
        f"teacher.model_name_or_path={path}: its vocabulary is not that of the student ({len(theirs)} and {len(ours)} "
        f"tokens; {other!r} is {theirs.get(other)} and {ours.get(other)}), so their probabilities cannot be compared. "
        "Choose a teacher of the same family"
    )
