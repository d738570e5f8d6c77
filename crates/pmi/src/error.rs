use thiserror::Error;

/// Why bytes are not what a rank or a daemon says, or say what the relay cannot do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PmiError {
    #[error("a frame begins with `{0}`, which is no length")]
    Length(String),
    #[error("a frame of {bytes} bytes is longer than {most}")]
    LongFrame { bytes: usize, most: usize },
    #[error("a line is longer than {most} bytes")]
    LongLine { most: usize },
    #[error("a message is not text")]
    Text,
    #[error("`{0}` is no pair of a key and a value")]
    Pair(String),
    #[error("a message does not begin with `cmd=NAME`")]
    NoCommand,
    #[error("the rank begins with `{0}`, which is no PMI session")]
    NoInit(String),
    #[error("the rank speaks PMI {0}.{1}: PMI 1.1 and PMI 2.0 are known")]
    Version(u32, u32),
    #[error("the rank asks for `{0}`, which a rank under kedge cannot have")]
    Unsupported(String),
    #[error("the rank asks for `{0}` before it has begun its session")]
    Early(String),
    #[error("the answer to `{request}` lacks `{key}`")]
    Lacks { request: &'static str, key: &'static str },
    #[error("the step daemon refuses `{request}`: {why}")]
    Refused { request: &'static str, why: String },
    #[error("the step daemon says `{0}`, which nobody has asked for")]
    Unasked(String),
    #[error("`{0}` is under way, which no image holds")]
    UnderWay(String),
    #[error("the step daemon answers `{request}` with `{answer}`")]
    Answer { request: &'static str, answer: String },
    #[error("the rank has told the step more than {most} bytes, which no image holds")]
    ToldMuch { most: usize },
    #[error("more than {most} bytes wait for the rank, which does not read them")]
    Unread { most: usize },
}
