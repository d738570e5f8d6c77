//! A small HTTP server: one question a connection, some connections at a time.

use crate::Failure;
use kedge_server::Openings;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// How long a whole request may take to arrive, and its response to be sent: collectors ask at
/// once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest request, in bytes: a longer one is none of a collector's.
const MAX_REQUEST_LEN: usize = 8 << 10;
/// Connections at a time. Where there are more, the oldest of the address that has most goes: who
/// says nothing keeps nobody else out.
const AT_ONCE: usize = 64;
/// Before a try after one that failed, such as for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// What a page has.
pub(crate) enum Page {
    /// Figures for Prometheus.
    Figures(String),
    Text(String),
    /// What is asked about is not well, and why.
    Unwell(String),
}

/// Gives the page at a path, if there is one.
pub(crate) type Pages<'a> = &'a (dyn Fn(&str) -> Option<Result<Page, Failure>> + Sync);

/// Listens at `address`.
///
/// # Errors
/// Nothing can.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).map_err(|error| {
        Failure::new(format!("cannot listen on {address}: {error}; choose another port"))
    })
}

/// Answers `GET` of each of the `pages`, until the process ends.
pub(crate) fn serve(listener: &TcpListener, pages: Pages<'_>) -> ! {
    let openings = Openings::new(AT_ONCE);
    thread::scope(|scope| {
        loop {
            let accepted = listener.accept();
            let counted = accepted.and_then(|(stream, from)| {
                let opened = openings.add(&stream, from.ip())?;
                Ok((stream, opened))
            });
            let begun = counted.and_then(|(stream, opened)| {
                let answers = move || {
                    // Whoever goes away meanwhile needs no answer.
                    let _ = answer(stream, pages);
                    drop(opened);
                };
                thread::Builder::new().name("http".into()).spawn_scoped(scope, answers)
            });
            if begun.is_err() {
                thread::sleep(PAUSE);
            }
        }
    })
}

fn answer(mut stream: TcpStream, pages: Pages<'_>) -> std::io::Result<()> {
    let head = question(&mut stream)?;
    let mut words = head.split([' ', '\r', '\n']);
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/")) => {
            ("200 OK", PLAIN, "kedge: the figures are at /metrics\n".into())
        }
        (Some("GET"), Some(path)) => match pages(path) {
            Some(Ok(Page::Figures(text))) => {
                ("200 OK", "text/plain; version=0.0.4; charset=utf-8", text)
            }
            Some(Ok(Page::Text(text))) => ("200 OK", PLAIN, text),
            Some(Ok(Page::Unwell(why))) => ("503 Service Unavailable", PLAIN, why),
            Some(Err(error)) => {
                ("500 Internal Server Error", PLAIN, format!("{}\n", error.message()))
            }
            None => ("404 Not Found", PLAIN, "the figures are at /metrics\n".into()),
        },
        _ => ("405 Method Not Allowed", PLAIN, "GET /metrics is all there is\n".into()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    );
    write(&mut stream, (head + &body).as_bytes())
}

/// Writes all of it within [`REQUEST_TIMEOUT`].
fn write(stream: &mut TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    let end = Instant::now() + REQUEST_TIMEOUT;
    while !bytes.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            count => bytes = &bytes[count..],
        }
    }
    Ok(())
}

const PLAIN: &str = "text/plain; charset=utf-8";

/// Reads up to the empty line that ends a question's head.
fn question(stream: &mut TcpStream) -> std::io::Result<String> {
    let end = Instant::now() + REQUEST_TIMEOUT;
    let mut head = Vec::new();
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > MAX_REQUEST_LEN {
            return Err(ErrorKind::InvalidData.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut some = [0; 1024];
        match stream.read(&mut some)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&some[..count]),
        }
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four times as many connections as are answered at once, which say nothing.
    #[test]
    fn who_says_nothing_keeps_nobody_waiting() {
        let listener = listen("127.0.0.1:0".parse().expect("an address")).expect("a port");
        let address = listener.local_addr().expect("its address");
        let pages = |path: &str| (path == "/x").then(|| Ok(Page::Text("there".into())));
        thread::spawn(move || serve(&listener, &pages));
        let begin = Instant::now();
        let silent = || TcpStream::connect(address).expect("it listens");
        let _silent: Vec<TcpStream> = (0..4 * AT_ONCE).map(|_| silent()).collect();
        let mut asks = silent();
        asks.write_all(b"GET /x HTTP/1.1\r\n\r\n").expect("room in the socket");
        let mut answer = String::new();
        asks.read_to_string(&mut answer).expect("an answer");
        assert!(answer.ends_with("there"), "{answer}");
        // Sixteen at a time would take sixteen rounds of REQUEST_TIMEOUT.
        assert!(begin.elapsed() < 5 * REQUEST_TIMEOUT, "{:?}", begin.elapsed());
    }
}
