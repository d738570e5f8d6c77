use super::*;

/// An entry with a header of 64 bytes, a name and its padding.
struct Entry<'p> {
    kind: u16,
    sm: u32,
    flags: u64,
    name: &'static str,
    payload: &'p [u8],
    size: u64,
}

const PTX: Entry<'static> = Entry { kind: 1, sm: 75, flags: 0x11, name: "", payload: b"", size: 0 };

impl Entry<'_> {
    fn bytes(&self) -> Vec<u8> {
        let name_size = if self.name.is_empty() { 0 } else { (self.name.len() + 8) / 8 * 8 };
        let header = (ENTRY_HEADER + name_size) as u32;
        let padded = self.payload.len().next_multiple_of(8);
        let mut bytes = Vec::new();
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(0x101u16.to_le_bytes());
        bytes.extend(header.to_le_bytes());
        bytes.extend((padded as u64).to_le_bytes());
        bytes.extend((self.payload.len() as u32).to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend([5, 0, 9, 0]);
        bytes.extend(self.sm.to_le_bytes());
        bytes.extend(if self.name.is_empty() { 0 } else { ENTRY_HEADER as u32 }.to_le_bytes());
        bytes.extend((self.name.len() as u32).to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(self.name.as_bytes());
        bytes.resize(header as usize, 0);
        bytes.extend(self.payload);
        bytes.resize(header as usize + padded, 0);
        bytes
    }
}

fn container(entries: &[Entry<'_>]) -> Vec<u8> {
    let all: Vec<u8> = entries.iter().flat_map(Entry::bytes).collect();
    let mut bytes = Vec::new();
    bytes.extend(MAGIC.to_le_bytes());
    bytes.extend([1, 0, 16, 0]);
    bytes.extend((all.len() as u64).to_le_bytes());
    bytes.extend(all);
    bytes
}

fn lz4(size: u64) -> Entry<'static> {
    // Literals "abcd", then a match of 8 bytes 4 back, then literals "wxyzv".
    let payload = b"\x44abcd\x04\x00\x50wxyzv";
    Entry { flags: 0x2011, payload, size, ..PTX }
}

fn zstd(size: u64) -> Entry<'static> {
    // A frame of one raw block: magic, single segment, content size 5, last raw block of 5 bytes.
    let payload = b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello";
    Entry { flags: 0x8011, payload, size, ..PTX }
}

#[test]
fn entries_are_listed_with_their_properties() {
    let elf = Entry { kind: 2, sm: 90, flags: 0x10_0011, payload: b"\x7fELF", ..PTX };
    let named = Entry { name: "a b.cu", payload: b".version 9.5\n\0", ..PTX };
    let bytes = container(&[elf, named]);
    let all = images(&bytes).unwrap();
    assert_eq!((all[0].kind, all[0].sm, all[0].sm_suffix), (ImageKind::Elf, 90, Some('a')));
    assert_eq!((all[1].kind, all[1].name.as_str()), (ImageKind::Ptx, "a b.cu"));
    assert_eq!(all[1].version, (9, 5));
    assert_eq!(all[1].text().unwrap(), ".version 9.5\n");
}

#[test]
fn payloads_are_decompressed() {
    let bytes = container(&[lz4(17), zstd(5)]);
    let all = images(&bytes).unwrap();
    assert_eq!(all[0].text().unwrap(), "abcdabcdabcdwxyzv");
    assert_eq!(all[1].text().unwrap(), "hello");
}

#[test]
fn a_false_size_is_found() {
    for entry in [lz4(16), lz4(18), lz4(1 << 28), zstd(4), zstd(6), zstd(1 << 28)] {
        let bytes = container(&[entry]);
        let error = images(&bytes).unwrap()[0].data().unwrap_err();
        assert!(matches!(error, FatbinError::Decompress { .. }), "{error}");
    }
    let bytes = container(&[zstd(MAX_IMAGE + 1)]);
    let error = images(&bytes).unwrap()[0].data().unwrap_err();
    assert_eq!(error, FatbinError::TooLarge(MAX_IMAGE + 1));
}

#[test]
fn containers_may_follow_each_other() {
    let one = container(&[Entry { payload: b"one", ..PTX }]);
    let two = container(&[Entry { payload: b"two", ..PTX }]);
    let bytes = [one.as_slice(), &[0; 8], &two].concat();
    let all = images(&bytes).unwrap();
    let texts: Vec<_> = all.iter().map(|image| image.text().unwrap()).collect();
    assert_eq!(texts, ["one", "two"]);
    assert_eq!(container_len(&bytes).unwrap(), one.len() as u64);
}

#[test]
fn bundles_are_expanded() {
    // Two records: a PTX image with a name, and a cubin without one.
    let mut first = Entry { sm: 80, name: "s.cu", ..PTX }.bytes();
    first[4..8].copy_from_slice(&0u32.to_le_bytes());
    first[8..16].copy_from_slice(&6u64.to_le_bytes());
    let mut second = Entry { kind: 2, sm: 90, ..PTX }.bytes();
    second[4..8].copy_from_slice(&6u32.to_le_bytes());
    second[8..16].copy_from_slice(&4u64.to_le_bytes());
    let records = [first, second].concat();

    let mut bundle = Entry { kind: KIND_BUNDLE, payload: b"firstXlast", ..PTX }.bytes();
    let header = ENTRY_HEADER + 8 + records.len();
    bundle[4..8].copy_from_slice(&(header as u32).to_le_bytes());
    bundle[20..24].copy_from_slice(&(ENTRY_HEADER as u32).to_le_bytes());
    let mut options = 2u32.to_le_bytes().to_vec();
    options.extend((records.len() as u32).to_le_bytes());
    options.extend(records);
    bundle.splice(ENTRY_HEADER..ENTRY_HEADER, options);
    let mut bytes = container(&[]);
    bytes[8..16].copy_from_slice(&(bundle.len() as u64).to_le_bytes());
    bytes.extend(bundle);

    let all = images(&bytes).unwrap();
    assert_eq!((all[0].kind, all[0].sm, all[0].name.as_str()), (ImageKind::Ptx, 80, "s.cu"));
    assert_eq!(all[0].text().unwrap(), "firstX");
    assert_eq!((all[1].kind, all[1].sm), (ImageKind::Elf, 90));
    assert_eq!(all[1].data().unwrap().as_ref(), b"last");
}

#[test]
fn no_truncation_is_accepted_as_whole() {
    let bytes = container(&[lz4(17), Entry { name: "n", payload: b"text", ..PTX }]);
    for length in 0..bytes.len() {
        assert!(images(&bytes[..length]).is_err(), "{length}");
    }
}

#[test]
fn the_newest_general_ptx_that_runs_is_chosen() {
    let ptx = |sm, flags| Entry { sm, flags, payload: b"x", ..PTX };
    let chosen = |entries: &[Entry<'_>], max| {
        let bytes = container(entries);
        let all = images(&bytes).unwrap();
        select_ptx(&all, max).map(|image| (image.sm, image.sm_suffix))
    };
    let cubin = Entry { kind: 2, sm: 90, payload: b"x", ..PTX };
    assert_eq!(chosen(&[ptx(70, 0), ptx(80, 0), ptx(100, 0), cubin], 90), Some((80, None)));
    assert_eq!(chosen(&[ptx(80, 0), ptx(90, FLAG_ARCHITECTURE)], 90), Some((80, None)));
    let specific = [ptx(90, FLAG_ARCHITECTURE), ptx(90, FLAG_FAMILY)];
    assert_eq!(chosen(&specific, 90), Some((90, Some('f'))));
    assert_eq!(chosen(&[ptx(121, 0)], 90), None);
}

#[test]
fn buffers_are_classified() {
    for (bytes, kind) in [
        (&b"\x50\xed\x55\xba"[..], Kind::Fatbin),
        (b"\x7fELF\x02", Kind::Elf),
        (b"// made by hand\n/* a\n*/ .version 8.0", Kind::Ptx),
        (b"\n\t.version 8.0\0", Kind::Ptx),
        (b"// a comment longer than what is known", Kind::Ptx),
        (b"// a text that is no PTX\0", Kind::Unknown),
        (b"// c\nint main() {}", Kind::Unknown),
        (b"BC\xc0\xde", Kind::NvvmOrLto),
        (b"", Kind::Unknown),
        (b"   ", Kind::Unknown),
        (b"/*", Kind::Ptx),
    ] {
        assert_eq!(classify(bytes), kind, "{bytes:?}");
    }
}

/// The length that is found when only `bytes` can be read.
fn length_of(bytes: &[u8]) -> Result<(Kind, u64), FatbinError> {
    image_len(&mut |at, buffer| {
        let known = bytes.get(at as usize..).unwrap_or_default();
        let count = known.len().min(buffer.len());
        buffer[..count].copy_from_slice(&known[..count]);
        count
    })
}

/// An ELF file with a segment, a section that has bytes and one that has none, whose tables end at
/// 400.
fn elf() -> Vec<u8> {
    let mut file = vec![0; 500];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(32, &64u64.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &1u16.to_le_bytes());
    put(40, &208u64.to_le_bytes());
    put(58, &64u16.to_le_bytes());
    put(60, &3u16.to_le_bytes());
    // The segment: bytes 64 to 100. The sections: 100 to 110, and 4096 bytes of nothing.
    put(64 + 8, &64u64.to_le_bytes());
    put(64 + 32, &36u64.to_le_bytes());
    put(208 + 64 + 4, &1u32.to_le_bytes());
    put(208 + 64 + 24, &100u64.to_le_bytes());
    put(208 + 64 + 32, &10u64.to_le_bytes());
    put(208 + 128 + 4, &8u32.to_le_bytes());
    put(208 + 128 + 24, &110u64.to_le_bytes());
    put(208 + 128 + 32, &4096u64.to_le_bytes());
    file
}

#[test]
fn lengths_follow_from_headers() {
    assert_eq!(length_of(&elf()), Ok((Kind::Elf, 400)));
    let mut sections_counted_in_the_first = elf();
    sections_counted_in_the_first[60] = 0;
    sections_counted_in_the_first[208 + 32] = 3;
    assert_eq!(length_of(&sections_counted_in_the_first), Ok((Kind::Elf, 400)));
    let mut long_section = elf();
    long_section[208 + 64 + 32..][..2].copy_from_slice(&390u16.to_le_bytes());
    assert_eq!(length_of(&long_section), Ok((Kind::Elf, 490)));

    let fatbin = container(&[lz4(17)]);
    assert_eq!(length_of(&fatbin), Ok((Kind::Fatbin, fatbin.len() as u64)));

    let mut text = b".version 8.0\n".repeat(1000);
    text.push(0);
    assert_eq!(length_of(&text), Ok((Kind::Ptx, 13_001)));
}

#[test]
fn lengths_beyond_what_can_be_read_are_errors() {
    assert_eq!(length_of(b".version 8.0"), Err(FatbinError::Unreadable(12)));
    assert_eq!(length_of(b"nonsense"), Err(FatbinError::UnknownKind));
    assert!(matches!(length_of(&elf()[..300]), Err(FatbinError::Unreadable(_))));
    let mut many_sections = elf();
    many_sections[40..48].copy_from_slice(&(u64::MAX - 8).to_le_bytes());
    assert!(matches!(length_of(&many_sections), Err(FatbinError::TooLarge(_))));
}
