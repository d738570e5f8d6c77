//! A server of devices, for the tests alone: `kedge serve` on a free port of this machine.

use crate::job::{family, name, send};
use crate::{kedge, root};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Ends with its value.
#[derive(Debug)]
pub struct Served {
    child: Child,
    /// As `--gpu` takes it.
    pub address: String,
    said: Arc<Mutex<String>>,
}

impl Served {
    /// Starts `kedge serve` with `options`.
    ///
    /// # Panics
    /// It does not say where it listens.
    pub fn start(options: &[&str]) -> Served {
        let mut command = Command::new(kedge());
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(options);
        command.env("XDG_CACHE_HOME", root().join("target/caches"));
        Served::started(command)
    }

    /// Starts a server by `command`, whose standard error says where it listens.
    ///
    /// # Panics
    /// It does not.
    pub fn started(mut command: Command) -> Served {
        let command = command.stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("kedge: build it first (cargo build --release)");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut first = String::new();
        let address = loop {
            let Some(Ok(line)) = lines.next() else { panic!("kedge serve said: {first}") };
            if let Some((_, address)) = line.split_once(" is lent at ") {
                // Of JSON, what is before the text's end.
                break address.split('"').next().unwrap_or_default().to_owned();
            }
            first.push_str(&line);
            first.push('\n');
        };
        let said = Arc::new(Mutex::new(first));
        let keeps = said.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut said = keeps.lock().unwrap_or_else(PoisonError::into_inner);
                said.push_str(&line);
                said.push('\n');
            }
        });
        Served { child, address, said }
    }

    /// Returns what it has said, but for the line that it listens.
    pub fn said(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it has ended: how.
    ///
    /// # Panics
    /// The kernel does not tell.
    pub fn status(&mut self) -> ExitStatus {
        self.child.wait().expect("a child")
    }

    /// Asks for a page of its figures, as `question` has it: the answer, or what has come of it.
    ///
    /// # Panics
    /// It has said no address for that, or nothing listens there.
    pub fn ask(&self, question: &str) -> String {
        let said = self.said();
        let (_, address) = said.split_once("its figures are at http://").expect("its figures");
        let address = address.split('/').next().expect("an address");
        let mut stream = TcpStream::connect(address).expect("a connection");
        let mut answer = String::new();
        // Whoever is refused may find the connection closed while he speaks.
        let _ = stream.write_all(question.as_bytes());
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    /// Returns its figures: each with its labels, and its value.
    ///
    /// # Panics
    /// They are none.
    pub fn figures(&self) -> BTreeMap<String, f64> {
        let answer = self.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        let lines = body.lines().filter(|line| !line.starts_with('#'));
        let split = lines.map(|line| line.rsplit_once(' ').expect("a figure and a value"));
        split.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect()
    }

    /// Returns its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Behind a command that started it; its sessions' proxies are not it.
        let servers: Vec<_> =
            family(self.child.id()).into_iter().filter(|pid| name(*pid) == "kedge").collect();
        send("KILL", &servers);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
