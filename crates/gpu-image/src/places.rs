//! The image of a client whose devices are of several places: `gpu-PID.kimg` names one file for
//! each place, which has the format of a client's whose devices are of one place.

use crate::saved::{HELD_SECTION, SECTION, SavedProxy, SavedSharing, StateError};
use kedge_image::{FileEntry, ImageError, ImageFile, Manifest};
use kedge_protocol::{DeviceInfo, Hello};
use kedge_wire::{Bytes, List, Text, wire};
use std::collections::BTreeSet;
use std::path::Path;

/// The version of [`SavedPlaces`], which is its first field.
pub const PLACES_VERSION: u32 = 1;
/// The number of the section. A reader that does not know of places finds no section that it knows.
pub const PLACES_SECTION: u64 = 18;
const _: () = assert!(PLACES_SECTION != SECTION && PLACES_SECTION != HELD_SECTION);

wire! {
    /// A client whose devices are of several places.
    #[derive(Debug, Clone, PartialEq)]
    pub struct SavedPlaces {
        pub version: u32,
        /// The devices as `--gpu` named them.
        pub gpu: Text<4096>,
        pub hello: Hello,
        pub driver_version: u32,
        pub client_memory: bool,
        /// All of the client's devices, as it was told of them.
        pub devices: List<DeviceInfo, 16>,
        /// The number of the newest message that was taken from the ring.
        pub position: u64,
        pub places: List<SavedPlace, 16>,
    }

    /// One place and the file of its devices.
    #[derive(Debug, Clone, PartialEq)]
    pub struct SavedPlace {
        /// The client's numbers of this place's devices, rising.
        pub windows: List<u32, 16>,
        /// The name of the file of what the devices hold, in the same folder.
        pub file: Text<256>,
        pub bytes: u64,
        pub checksum: u64,
    }
}

impl SavedPlace {
    /// Returns the manifest's entry for the file of this place.
    pub fn entry(&self) -> FileEntry {
        FileEntry { name: self.file.to_string(), bytes: self.bytes, checksum: self.checksum }
    }
}

impl SavedPlaces {
    /// Returns the part that describes the client, without objects or memory.
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

/// Returns the name of a place's file; `client` is the name of the client's.
pub fn place_file(client: &str, place: usize) -> String {
    format!("{}{PLACE}{place}{KIMG}", client.strip_suffix(KIMG).unwrap_or(client))
}

/// Returns whether a file name is that of a place's file.
pub fn is_of_place(name: &str) -> bool {
    name.ends_with(KIMG) && name.contains(PLACE)
}

const GPU: &str = "gpu-";
const KIMG: &str = ".kimg";
const PLACE: &str = "-place-";

/// Reads a client's places from its file; `None` if its devices are of one place.
///
/// # Errors
/// The file cannot be read, is damaged, or is of another version than [`PLACES_VERSION`].
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

/// Checks that the files that clients name for their places are those of the manifest, in the image
/// at `folder` and in each of its parts.
///
/// # Errors
/// All that is wrong: a client names a file that the manifest does not have, or another client's,
/// or the manifest has a place's file that no client names.
pub fn check_places(folder: &Path) -> Result<(), Vec<ImageError>> {
    let one = |error| vec![error];
    let manifest = Manifest::read(folder).map_err(one)?;
    for part in &manifest.parts {
        let folder = part.check(folder).map_err(one)?;
        check_one(&folder, &Manifest::read(&folder).map_err(one)?)?;
    }
    check_one(folder, &manifest)
}

/// Checks the image of one part.
fn check_one(folder: &Path, manifest: &Manifest) -> Result<(), Vec<ImageError>> {
    let (mut errors, mut named) = (Vec::new(), BTreeSet::new());
    let all = || manifest.files.iter();
    let damaged =
        |name: &str, what| ImageError::Damaged { path: folder.join(name), offset: 0, what };
    for client in all().filter(|entry| is_of_client(&entry.name)) {
        let path = folder.join(&client.name);
        let places = match ImageFile::open(&path, Some(client)).map(|file| read_places(&file)) {
            Ok(Ok(None)) => continue,
            Ok(Ok(Some(saved))) => saved.places,
            Ok(Err(_)) => {
                errors.push(damaged(&client.name, "what it tells of its places is nonsense"));
                continue;
            }
            Err(error) => {
                errors.push(error);
                continue;
            }
        };
        for (at, place) in places.iter().enumerate() {
            if *place.file != place_file(&client.name, at) {
                errors.push(damaged(&client.name, "it names another's file for a place"));
            } else if !all().any(|entry| *entry == place.entry()) {
                errors.push(damaged(&place.file, "it is not the file that its client names"));
            }
            named.insert(place.file.to_string());
        }
    }
    let unnamed = all().filter(|entry| is_of_place(&entry.name) && !named.contains(&entry.name));
    errors.extend(unnamed.map(|entry| damaged(&entry.name, "no client names it for a place")));
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// Returns whether a file name is that of a client's file.
fn is_of_client(name: &str) -> bool {
    name.starts_with(GPU) && name.ends_with(KIMG) && !is_of_place(name)
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
        // A reader that does not know of places must take it for damaged, and not for a client
        // without memory.
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

    /// Writes an image whose client has two places; returns its folder and manifest.
    fn image(name: &str) -> (PathBuf, Manifest) {
        let folder = std::env::temp_dir().join(format!("kplaces-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, section: &[u8]| {
            let writer = ImageWriter::create(&folder.join(name)).unwrap();
            writer.section(PLACES_SECTION, section).unwrap();
            writer.finish().unwrap()
        };
        let mut saved = sample();
        let mut places = saved.places.into_inner();
        let files: Vec<FileEntry> =
            places.iter().map(|place| write(&place.file, &[1; 100])).collect();
        for (place, entry) in places.iter_mut().zip(&files) {
            (place.bytes, place.checksum) = (entry.bytes, entry.checksum);
        }
        saved.places = List::new(places).unwrap();
        let mut section = Vec::new();
        kedge_wire::encode(&saved, &mut section);
        let mut manifest = Manifest::new("j".into(), Vec::new(), 0);
        manifest.files.push(write("gpu-77.kimg", &section));
        manifest.files.extend(files);
        (folder, manifest)
    }

    #[test]
    fn places_are_the_image_s_own() {
        let (folder, whole) = image("own");
        check_one(&folder, &whole).unwrap();
        let told = |manifest: &Manifest| {
            let errors = check_one(&folder, manifest).unwrap_err();
            errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        };
        let mut other = whole.clone();
        other.files[2].checksum += 1;
        let said = told(&other);
        assert!(said.contains("gpu-77-place-1.kimg") && said.contains("client names"), "{said}");
        let mut missing = whole.clone();
        missing.files.pop();
        assert!(told(&missing).contains("gpu-77-place-1.kimg"));
        let mut unnamed = whole.clone();
        unnamed.files.remove(0);
        assert_eq!(told(&unnamed).matches("no client names it").count(), 2);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_places_file_is_no_clients() {
        let name = place_file("gpu-12.kimg", 3);
        assert_eq!(name, "gpu-12-place-3.kimg");
        assert!(is_of_place(&name) && !is_of_place("gpu-12.kimg"));
    }
}
