//! What a server says of what happens.

use kedge_control::job_event;
use kedge_control::joblog::JobLog;
use std::net::SocketAddr;

/// The target of what it says.
const TARGET: &str = "server";

/// What that is about, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The server listens.
    Serves,
    /// A session begins, or a proxy that answers NVML.
    Begins,
    Ends,
    /// Somebody gets nothing.
    Refused,
    /// The server was told to end, and what becomes of that.
    Ending,
    /// The server cannot do what it should.
    Trouble,
    /// What whoever runs the server may want to know.
    Advice,
}

impl Event {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Event::Serves => "serves",
            Event::Begins => "begins",
            Event::Ends => "ends",
            Event::Refused => "refused",
            Event::Ending => "ending",
            Event::Trouble => "trouble",
            Event::Advice => "advice",
        }
    }
}

/// A line of a server's log.
#[derive(Debug, Clone)]
pub struct Said {
    pub event: Event,
    /// All of it, for people.
    pub text: String,
    /// The name of the key that it is about.
    pub key: Option<String>,
    /// Where that is.
    pub from: Option<SocketAddr>,
    /// Devices, as `--gpu` has them.
    pub gpu: Option<String>,
    /// The process of a proxy.
    pub proxy: Option<u32>,
}

impl Said {
    /// Returns what is about nobody.
    pub fn new(event: Event, text: impl Into<String>) -> Said {
        Said { event, text: text.into(), key: None, from: None, gpu: None, proxy: None }
    }

    /// Logs it: an event whose fields are what is known.
    pub fn log(&self, log: &JobLog) {
        let (event, text) = (self.event.name(), &self.text);
        let (key, gpu, proxy) = (self.key.as_deref(), self.gpu.as_deref(), self.proxy);
        let from = self.from.map(|from| from.to_string());
        let from = from.as_deref();
        macro_rules! said {
            ($level:ident) => {
                job_event!(
                    $level Plain,
                    target: TARGET,
                    fields: { event, key, from, gpu, proxy },
                    log,
                    "{text}"
                )
            };
        }
        match self.event {
            Event::Trouble => said!(ERROR),
            Event::Refused | Event::Advice => said!(WARN),
            Event::Serves | Event::Begins | Event::Ends | Event::Ending => said!(INFO),
        }
    }
}
