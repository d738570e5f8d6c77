//! Why a server refuses what somebody asks for who may ask. The near end has it in its job's log.

use kedge_keys::KeyError;
use std::io;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum Refusal {
    #[error("it is about to end, and begins no more sessions")]
    Ending,
    #[error("it has {0} sessions already: try again when some have ended")]
    Full(usize),
    #[error("it answers NVML for {0} of your jobs already")]
    Management(usize),
    #[error("its session is begun twice at once")]
    Twice,
    #[error("a later attempt has begun that session")]
    Later,
    #[error("that session is over")]
    Over,
    #[error("that session is another's")]
    Another,
    #[error("the proxy of that session does not end")]
    Stuck,
    #[error("it cannot start a proxy: {0}")]
    Start(io::Error),
    #[error("it takes no jobs: who runs the server may allow that (`kedge serve --take-jobs`)")]
    TakesNone,
    #[error("{0} jobs move there already: try again later")]
    Taking(usize),
    #[error("{0} jobs of this key have moved there already and not ended: try again later")]
    TakingOfOne(usize),
    #[error("it cannot start what takes a job: {0}")]
    Taker(io::Error),
    #[error("it has no devices of its own")]
    NoneOfItsOwn,
    #[error("there is no device {number}: it has 0 to {last}")]
    NoDevice { number: u32, last: usize },
    #[error(
        "your key may have {most} sessions (processes with devices) at a time, and has them: let \
         one end, or ask who runs the server for more"
    )]
    Sessions { most: u32 },
    #[error(
        "your key may have {most} jobs at a time, and has them: let one end, or ask who runs the \
         server for more"
    )]
    Jobs { most: u32 },
    #[error(
        "your key may use {most} of its devices at a time, and with these it would use {would}: \
         name fewer (--gpu HOST/I), or ask who runs the server for more"
    )]
    Gpus { most: u32, would: usize },
    #[error("your key may not use its device {number}, but {may}: name such ones (--gpu HOST/I)")]
    NotYours { number: u32, may: String },
    #[error("it does not know how many devices it has, and your key may not use all: name some")]
    Unnamed,
    #[error(
        "what your key may have cannot be read there: who runs the server finds why in its log"
    )]
    Limits(#[source] KeyError),
    #[error("it has no user for your key: who runs the server finds why in its log")]
    User(#[source] io::Error),
}
