//! Variables, arrays, textures, handles and events, made in one process and made again in another.

use crate::driver::Cuda;
use crate::rig::*;
use kedge_cuda_types::CuError;
use kedge_device::{Backend, Code, Object, Piece, Restore, Snapshots};
use kedge_device_nvidia::NvidiaBackend;
use kedge_protocol::*;
use kedge_wire::{Bytes, List};
use std::error::Error;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};

const MODULE: ModuleId = ModuleId(1);
const OTHER: ModuleId = ModuleId(2);
const OUT: u64 = BASE;
const BLOCK: u32 = 64;

/// The kernels of objects.cu, by their indices.
const KERNELS: [&str; 3] = ["bump", "report", "fetch"];

struct Made {
    textures: Vec<u64>,
    variables: Vec<u64>,
}

/// What the program does until the checkpoint; with the notes of one, what a restart repeats of it.
fn build(
    image: &[u8],
    notes: Option<&[u8]>,
) -> Result<(std::sync::Arc<NvidiaBackend>, Made), Box<dyn Error>> {
    let (backend, first) = (backend()?, notes.is_none());
    if let Some(notes) = notes {
        backend.restore_begin(notes)?;
    }
    grant(&backend, SLAB)?;
    let load = |module| {
        let loaded = backend.load_module(CTX, module, Code::Whole(image.to_vec()));
        loaded.map_err(|error| format!("load: {} {}", CuError(error.code), &*error.message))
    };
    load(MODULE)?;
    for (index, name) in (0..).zip(KERNELS) {
        backend.kernel(MODULE, index, name)?;
    }
    if first {
        launch(&backend, MODULE, 0, &[OUT, 4096])?;
        finish(&backend, STREAM)?;
    }
    backend.create_stream(StreamId(2), CTX, true, 0)?;
    load(OTHER)?;
    backend.kernel(OTHER, 0, "report")?;
    if first {
        launch(&backend, OTHER, 0, &[OUT])?;
        finish(&backend, STREAM)?;
    }
    let variables = ["counter", "big"].map(|name| Ok(backend.global(MODULE, name)?.addr));
    let variables = variables.into_iter().collect::<Result<_, CuError>>()?;
    for (id, width, height, depth) in [(1, 100, 0, 0), (2, 33, 17, 0), (3, 9, 5, 7)] {
        let desc =
            ArrayDesc { device: 0, width, height, depth, format: 0x20, channels: 1, flags: 2 };
        backend.create_array(CTX, ArrayId(id), &desc)?;
    }
    // Two are ended before the checkpoint, and one takes the place of one of them: a restart does
    // not see them.
    let numbers = if first { &[0, 1, 2, 3, 4, 5][..] } else { &[1, 3, 4, 5, 6] };
    let make = |number: &u32| backend.create_texture(CTX, &texture(*number));
    let mut textures = numbers.iter().map(make).collect::<Result<Vec<_>, _>>()?;
    if first {
        for gone in [2, 0] {
            backend.destroy_texture(CTX, textures.remove(gone))?;
        }
        textures.push(make(&6)?);
    }
    backend.create_handle(MemHandleId(1), 0, 4 << 20, false)?;
    backend.map_handle(MemHandleId(1), BASE + SLAB, 4 << 20, 0)?;
    backend.set_access(BASE + SLAB, 4 << 20, 0, 3)?;
    for event in [EventId(1), EventId(2)] {
        backend.create_event(event, CTX, true, false)?;
    }
    Ok((backend, Made { textures, variables }))
}

fn texture(number: u32) -> Texture {
    let linear =
        TextureSource::Linear { addr: BASE + 4096, format: 0x20, channels: 1, bytes: 4096 };
    let (surface, array) = (number == 4, TextureSource::Array { array: ArrayId(2) });
    Texture {
        surface,
        source: if number.is_multiple_of(2) { array } else { linear },
        address: [1; 3],
        filter: 0,
        flags: 0,
        border: [0.0; 4],
        mipmap_filter: 0,
        mipmap_bias: 0.0,
        mipmap_clamp: [0.0; 2],
        view_format: 0,
    }
}

fn launch(backend: &NvidiaBackend, module: ModuleId, index: u32, words: &[u64]) -> Outcome {
    let params: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let size =
        backend.kernel(module, index, KERNELS[if module == OTHER { 1 } else { index as usize }])?;
    let size = size.params.iter().map(|p| p.offset + p.size).max().unwrap_or(0) as usize;
    let one = Dim3 { x: 1, y: 1, z: 1 };
    let launch = Launch {
        kernel: KernelRef { module, index },
        grid: Dim3 { x: 64, ..one },
        block: Dim3 { x: BLOCK, ..one },
        cluster: Dim3 { x: 0, y: 0, z: 0 },
        shared_bytes: 0,
        cooperative: false,
        params: Bytes::new(params[..size].to_vec())?,
        hints: List::default(),
    };
    Ok(backend.submit(STREAM, StreamOp::Launch { launch })?)
}

/// What the module's state looks like to its own kernel.
fn look(backend: &NvidiaBackend) -> Result<Vec<i64>, Box<dyn Error>> {
    launch(backend, MODULE, 1, &[OUT])?;
    finish(backend, STREAM)?;
    let mut out = [0; 64];
    Cuda::open()?.to_host(&mut out, OUT)?;
    Ok(out.chunks_exact(8).map(|word| word.try_into().map_or(0, i64::from_le_bytes)).collect())
}

pub(crate) fn make(image: &str, file: &str) -> Outcome {
    let (backend, made) = build(&std::fs::read(image)?, None)?;
    let cuda = Cuda::open()?;
    cuda.to_device(BASE + SLAB, &Pattern::new().at(0, CHUNK)[..4 << 20])?;
    for (event, fills) in [(EventId(1), 1), (EventId(2), 200)] {
        for _ in 0..fills {
            let (dst, width) = (BASE + (64 << 20), 64 << 20);
            let fill = StreamOp::Memset {
                dst,
                pitch: 0,
                value: 3,
                element: 4,
                width: width / 4,
                height: 1,
            };
            backend.submit(STREAM, fill)?;
        }
        backend.submit(STREAM, StreamOp::EventRecord { event })?;
    }
    finish(&backend, STREAM)?;
    // Arrays get what a snapshot with known bytes puts there.
    for (id, bytes) in [(1, 400), (2, 33 * 17 * 4), (3, 9 * 5 * 7 * 4)] {
        backend.restore(&Object::Array(ArrayId(id)), 0, Pattern::new().at(0, bytes))?;
    }
    backend.restore_end()?;
    let seen = look(&backend)?;
    rest(&backend)?;
    let snapshot = backend.snapshot(None)?;
    let mut out = BufWriter::new(File::create(file)?);
    let elapsed = backend.elapsed_ms(EventId(1), EventId(2))?;
    let head = [&seen[..], &[i64::from(elapsed.to_bits())]].concat();
    put_words(&mut out, &head)?;
    put_words(&mut out, &made.textures.iter().map(|word| *word as i64).collect::<Vec<_>>())?;
    put_bytes(&mut out, &snapshot.notes())?;
    for piece in snapshot.pieces() {
        let mut bytes = vec![0; piece.bytes as usize];
        snapshot.read(piece, piece.start, &mut bytes)?;
        put_piece(&mut out, piece)?;
        put_bytes(&mut out, &bytes)?;
    }
    out.flush()?;
    let handles: Vec<String> = made.textures.iter().map(|handle| format!("{handle:#x}")).collect();
    let mut names: Vec<_> = snapshot.pieces().iter().map(|piece| &piece.object).collect();
    names.dedup();
    say(&format!(
        "{{\"what\": \"made\", \"seen\": {seen:?}, \"elapsed_ms\": {elapsed}, \"variables\": {:x?}, \
         \"textures\": {handles:?}, \"objects\": {}}}",
        made.variables,
        names.len()
    ));
    names.iter().for_each(|name| say(&format!("    {name:?}")));
    Ok(())
}

pub(crate) fn remake(image: &str, file: &str) -> Outcome {
    let mut input = BufReader::new(File::open(file)?);
    let (before, handles) = (get_words(&mut input)?, get_words(&mut input)?);
    let notes = get_bytes(&mut input)?;
    let (backend, made) = build(&std::fs::read(image)?, Some(&notes))?;
    rest(&backend)?;
    let told = format!("{:x?} {:x?}", made.variables, made.textures);
    backend.restore_notes(&notes).map_err(|error| format!("{error}; {told}"))?;
    if !made.textures.iter().map(|word| *word as i64).eq(handles.iter().copied()) {
        return Err(format!("textures were {handles:x?}; {told}").into());
    }
    let mut saved = Vec::new();
    while let Some(piece) = get_piece(&mut input)? {
        let bytes = get_bytes(&mut input)?;
        backend.restore(&piece.object, piece.start, &bytes)?;
        saved.push((piece, bytes));
    }
    backend.restore_end()?;
    let again = backend.snapshot(None)?;
    for (piece, bytes) in &saved {
        let mut now = vec![0; bytes.len()];
        again.read(piece, piece.start, &mut now)?;
        if &now != bytes {
            return Err(format!("{:?} is not what it was", piece.object).into());
        }
    }
    drop(again);
    let elapsed = backend.elapsed_ms(EventId(1), EventId(2))?;
    let seen = [&look(&backend)?[..], &[i64::from(elapsed.to_bits())]].concat();
    say(&format!(
        "{{\"what\": \"made again\", \"seen\": {seen:?}, \"pieces\": {}, \"same\": {}}}",
        saved.len(),
        seen == before
    ));
    if seen == before { Ok(()) } else { Err(format!("it was {before:?}").into()) }
}

fn put_bytes(out: &mut impl Write, bytes: &[u8]) -> std::io::Result<()> {
    out.write_all(&(bytes.len() as u64).to_le_bytes())?;
    out.write_all(bytes)
}

fn get_bytes(input: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    input.read_exact(&mut length)?;
    let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn put_words(out: &mut impl Write, words: &[i64]) -> std::io::Result<()> {
    put_bytes(out, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
}

fn get_words(input: &mut impl Read) -> std::io::Result<Vec<i64>> {
    let bytes = get_bytes(input)?;
    Ok(bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, i64::from_le_bytes)).collect())
}

fn put_piece(out: &mut impl Write, piece: &Piece) -> std::io::Result<()> {
    let (kind, id, name) = match &piece.object {
        Object::Memory => (0, 0, ""),
        Object::Handle(id) => (1, id.0, ""),
        Object::Array(id) => (2, id.0, ""),
        Object::Variable { module, name } => (3, module.0, name.as_str()),
    };
    put_words(out, &[kind, i64::from(id), piece.start as i64, piece.bytes as i64])?;
    put_bytes(out, name.as_bytes())
}

fn get_piece(input: &mut BufReader<File>) -> Result<Option<Piece>, Box<dyn Error>> {
    use std::io::BufRead;
    if input.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let words = get_words(input)?;
    let name = String::from_utf8(get_bytes(input)?)?;
    let [kind, id, start, bytes] = words[..] else { return Err("a damaged file".into()) };
    let id = id as u32;
    let object = match kind {
        0 => Object::Memory,
        1 => Object::Handle(MemHandleId(id)),
        2 => Object::Array(ArrayId(id)),
        _ => Object::Variable { module: ModuleId(id), name },
    };
    Ok(Some(Piece { object, start: start as u64, bytes: bytes as u64 }))
}
