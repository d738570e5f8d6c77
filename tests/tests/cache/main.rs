//! The write-back cache: `kedge cache`.
#![forbid(unsafe_code)]

mod cache;
mod device;
mod fio;
mod images;
mod lease;
mod model;
mod model_programs;
mod partner;
mod partner_images;
mod power;
mod programs;
mod top;
mod users;
