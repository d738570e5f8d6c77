//! What an image has of a client whose devices are of several places: `gpu-PID.kimg` names a file
//! for each place, which is as that of a client whose devices are of one.

use crate::saved::{HELD_SECTION, SECTION, SavedProxy, SavedSharing, StateError};
use kedge_image::{FileEntry, ImageFile};
use kedge_protocol::{DeviceInfo, Hello};
use kedge_wire::{Bytes, List, Text, wire};

/// The version of what follows, which begins with it.
pub const PLACES_VERSION: u32 = 1;
/// The number of the section; whoever knows no places finds no section that it knows.
pub const PLACES_SECTION: u64 = 18;
const _: () = assert!(PLACES_SECTION != SECTION && PLACES_SECTION != HELD_SECTION);

wire! {
    /// A client whose devices are of several places.
    #[derive(Debug, Clone, PartialEq)]
    pub struct SavedPlaces {
        pub version: u32,
        /// As `--gpu` gave it.
        pub gpu: Text<4096>,
        pub hello: Hello,
        pub driver_version: u32,
        pub client_memory: bool,
        /// All of its devices, as it was told of them.
        pub devices: List<DeviceInfo, 16>,
        /// The newest message that was taken from the ring.
        pub position: u64,
        pub places: List<SavedPlace, 16>,
    }

    /// A place.
    #[derive(Debug, Clone, PartialEq)]
    pub struct SavedPlace {
        /// As which of the client's devices it sees this place's: rising.
        pub windows: List<u32, 16>,
        /// The file of what they hold, beside this one.
        pub file: Text<256>,
        pub bytes: u64,
        pub checksum: u64,
    }
}

impl SavedPlace {
    /// Returns the file of what its devices hold.
    pub fn entry(&self) -> FileEntry {
        FileEntry { name: self.file.to_string(), bytes: self.bytes, checksum: self.checksum }
    }
}

impl SavedPlaces {
    /// Returns what it tells of the client itself.
    pub fn client(&self) -> SavedProxy {
        SavedProxy {
            version: crate::VERSION,
            gpu: self.gpu.clone(),
            hello: self.hello.clone(),
            driver_version: self.driver_version,
            client_memory: self.client_memory,
            devices: self.devices.clone(),
            position: self.position,
            faults: List::default(),
            output: List::default(),
            objects: List::default(),
            steps: List::default(),
            notes: Bytes::default(),
            sharing: SavedSharing::default(),
        }
    }
}

/// Returns the name of the file of a place's devices, by that of its client's.
pub fn place_file(client: &str, place: usize) -> String {
    format!("{}{PLACE}{place}{KIMG}", client.strip_suffix(KIMG).unwrap_or(client))
}

/// Returns whether a file's name is that of a place's devices.
pub fn is_of_place(name: &str) -> bool {
    name.ends_with(KIMG) && name.contains(PLACE)
}

const KIMG: &str = ".kimg";
const PLACE: &str = "-place-";

/// Reads what the file of a client tells of its places; `None` where its devices are of one.
///
/// # Errors
/// The file cannot be read, is damaged, or is of another version than this one.
pub fn read_places(file: &ImageFile) -> Result<Option<SavedPlaces>, StateError> {
    if !file.has_section(PLACES_SECTION) {
        return Ok(None);
    }
    let section = file.section(PLACES_SECTION)?;
    let version = section.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    match version {
        Some(PLACES_VERSION) => {}
        Some(found) => return Err(StateError::UnknownPlaces { found }),
        None => return Err(StateError::Damaged("it is empty")),
    }
    let saved = kedge_wire::decode(&section);
    saved.map(Some).map_err(|_| StateError::Damaged("a section is nonsense"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::ImageWriter;
    use kedge_protocol::DeviceChoice;
    use std::fs;
    use std::path::PathBuf;

    fn sample() -> SavedPlaces {
        let choice = DeviceChoice { visible: None, pci_order: false };
        let program = Text::new("a program".into()).unwrap();
        let hello =
            Hello { version: 8, pid: 77, probe_addr: 4096, probe_value: 5, program, choice };
        let place = |windows: &[u32], at| SavedPlace {
            windows: List::new(windows.to_vec()).unwrap(),
            file: Text::new(place_file("gpu-77.kimg", at)).unwrap(),
            bytes: 4096,
            checksum: 9,
        };
        SavedPlaces {
            version: PLACES_VERSION,
            gpu: Text::new("a:7531/0,soft".into()).unwrap(),
            hello,
            driver_version: 13_000,
            client_memory: true,
            devices: List::default(),
            position: 12,
            places: List::new(vec![place(&[0, 2], 0), place(&[1], 1)]).unwrap(),
        }
    }

    fn written(name: &str, section: &[u8]) -> (PathBuf, ImageFile) {
        let name = format!("kplaces-{name}-{}.kimg", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_file(&path);
        let writer = ImageWriter::create(&path).unwrap();
        writer.section(PLACES_SECTION, section).unwrap();
        let entry = writer.finish().unwrap();
        let file = ImageFile::open(&path, Some(&entry)).unwrap();
        (path, file)
    }

    #[test]
    fn what_is_written_is_read() {
        let (saved, mut section) = (sample(), Vec::new());
        kedge_wire::encode(&saved, &mut section);
        let (path, file) = written("good", &section);
        assert_eq!(read_places(&file).unwrap(), Some(saved));
        // Whoever knows no places takes it for damaged, and not for a client without memory.
        assert!(crate::read(&file).is_err());
        assert_eq!(crate::contents(&file).unwrap().pid, 77);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn nonsense_is_told() {
        let mut section = Vec::new();
        kedge_wire::encode(&SavedPlaces { version: 2, ..sample() }, &mut section);
        for (name, bytes) in [("later", &section[..]), ("empty", &[]), ("cut", &section[..40])] {
            let (path, file) = written(name, bytes);
            let error = read_places(&file).unwrap_err();
            let known = matches!(error, StateError::UnknownPlaces { found: 2 });
            assert!(known == (name != "empty"), "{name}: {error}");
            fs::remove_file(path).unwrap();
        }
        section[0] = 1;
        let (path, file) = written("short", &section[..40]);
        assert!(matches!(read_places(&file), Err(StateError::Damaged(_))));
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_places_file_is_no_clients() {
        let name = place_file("gpu-12.kimg", 3);
        assert_eq!(name, "gpu-12-place-3.kimg");
        assert!(is_of_place(&name) && !is_of_place("gpu-12.kimg"));
    }
}
