//! Messages as they cross the line: protobuf, by prost.

use prost::Message;
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Sends messages of one type and receives those of another.
#[derive(Debug)]
pub struct Messages<Sent, Received>(PhantomData<fn(Sent) -> Received>);

/// One direction of it.
#[derive(Debug)]
pub struct Way<M>(PhantomData<fn(M) -> M>);

impl<Sent, Received> Default for Messages<Sent, Received> {
    fn default() -> Self {
        Messages(PhantomData)
    }
}

impl<Sent, Received> Codec for Messages<Sent, Received>
where
    Sent: Message + 'static,
    Received: Message + Default + 'static,
{
    type Encode = Sent;
    type Decode = Received;
    type Encoder = Way<Sent>;
    type Decoder = Way<Received>;

    fn encoder(&mut self) -> Way<Sent> {
        Way(PhantomData)
    }

    fn decoder(&mut self) -> Way<Received> {
        Way(PhantomData)
    }
}

impl<M: Message> Encoder for Way<M> {
    type Item = M;
    type Error = Status;

    fn encode(&mut self, message: M, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(to).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<M: Message + Default> Decoder for Way<M> {
    type Item = M;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<M>, Status> {
        M::decode(from).map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
}
